// SPDX-License-Identifier: MIT
// Tables and number formats against strings written by hand.
#include "model/report/table.h"

#include "kernels/core/error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace fp8flow {

using namespace report;

namespace {

TEST(Table, AlignsNumbersRightAndNamesLeft) {
    Table table({{"recipe", Align::left}, {"loss"}, {"error"}});
    table.add_row({"bf16", "2.3456", ""});
    table.add_row({"fp8_flow", "12.5", "0.07 %"});
    table.add_rule();
    table.add_row({"max", "12.5", "0.07 %"});
    EXPECT_EQ(table.text(),
              "recipe      loss   error\n"
              "--------  ------  ------\n"
              "bf16      2.3456\n"
              "fp8_flow    12.5  0.07 %\n"
              "--------  ------  ------\n"
              "max         12.5  0.07 %\n");
    EXPECT_EQ(Table({{"a"}}).text(2), "  a\n  -\n");
    EXPECT_EQ(
        table.markdown(),
        "| recipe | loss | error |\n|---|---:|---:|\n| bf16 | 2.3456 |  |\n| fp8_flow | 12.5 | 0.07 % |\n"
        "| max | 12.5 | 0.07 % |\n");
    EXPECT_THROW(table.add_row({"too", "few"}), Error);
}

TEST(Table, CountsColumnsOfUnicodeText) {
    EXPECT_EQ(display_width("plain"), 5u);
    EXPECT_EQ(display_width("Größe µ ≤"), 9u);
    EXPECT_EQ(display_width("\xff\xc3"), 2u);  // stray bytes
    EXPECT_EQ(pad("µ", 3, Align::right), "  µ");
    EXPECT_EQ(pad("long", 2, Align::left), "long");
    Table table({{"µs", Align::left}, {"n"}});
    table.add_row({"µ", "1"});
    EXPECT_EQ(table.text(), "µs  n\n--  -\nµ   1\n");
    Table pipes({{"a|b", Align::left}});
    pipes.add_row({"c|d"});
    EXPECT_EQ(pipes.markdown(), "| a\\|b |\n|---|\n| c\\|d |\n");
}

TEST(Format, SiAndBytes) {
    EXPECT_EQ(format_si(0), "0.00");
    EXPECT_EQ(format_si(7), "7.00");
    EXPECT_EQ(format_si(45.64), "45.6");
    EXPECT_EQ(format_si(999.4), "999");
    EXPECT_EQ(format_si(999.6), "1.00 k");
    EXPECT_EQ(format_si(1234567), "1.23 M");
    EXPECT_EQ(format_si(9.999), "10.0");
    EXPECT_EQ(format_si(99.96), "100");
    EXPECT_EQ(format_si(-45678), "-45.7 k");
    EXPECT_EQ(format_si(9.89e14), "989 T");
    EXPECT_EQ(format_si(30.5e9, 4), "30.50 G");
    EXPECT_EQ(format_bytes(0), "0 B");
    EXPECT_EQ(format_bytes(1023), "1023 B");
    EXPECT_EQ(format_bytes(1024), "1.00 KiB");
    EXPECT_EQ(format_bytes(1.5 * 1024 * 1024 * 1024), "1.50 GiB");
    EXPECT_EQ(format_bytes(1023.9 * 1024), "1.00 MiB");
    EXPECT_EQ(format_bytes(1000.0 * 1024), "1000 KiB");
    EXPECT_EQ(format_bytes(139.8 * 1024 * 1024 * 1024), "140 GiB");
}

TEST(Format, CountsAndFractions) {
    EXPECT_EQ(format_count(0), "0");
    EXPECT_EQ(format_count(999), "999");
    EXPECT_EQ(format_count(1000), "1,000");
    EXPECT_EQ(format_count(-123456), "-123,456");
    EXPECT_EQ(format_count(-1234567), "-1,234,567");
    EXPECT_EQ(format_count(std::numeric_limits<int64_t>::min()), "-9,223,372,036,854,775,808");
    EXPECT_EQ(format_fixed(3.14159, 3), "3.142");
    EXPECT_EQ(format_signed(0.0005, 3), "+0.001");
    EXPECT_EQ(format_signed(-0.0006, 3), "-0.001");
    EXPECT_EQ(format_signed(-0.0004, 3), "+0.000");
    EXPECT_EQ(format_percent(0.0025), "0.25 %");
    EXPECT_EQ(format_scientific(1e-4, 6), "1.000000E-04");
}

TEST(Format, Durations) {
    EXPECT_EQ(format_duration(0), "0 s");
    EXPECT_EQ(format_duration(850e-6), "850 us");
    EXPECT_EQ(format_duration(0.9996e-3), "1 ms");
    EXPECT_EQ(format_duration(0.0123), "12.3 ms");
    EXPECT_EQ(format_duration(4.56), "4.56 s");
    EXPECT_EQ(format_duration(59.94), "59.9 s");
    EXPECT_EQ(format_duration(59.96), "0:01:00");
    EXPECT_EQ(format_duration(3723), "1:02:03");
    EXPECT_EQ(format_duration(86399.6), "1 d 00:00:00");
    EXPECT_EQ(format_duration(2 * 86400 + 3 * 3600 + 4 * 60 + 5), "2 d 03:04:05");
    EXPECT_EQ(format_clock(80), "0:01:20");
    EXPECT_EQ(format_clock(360000), "100:00:00");
    EXPECT_EQ(format_clock(-1), "?");
}

TEST(Format, NamesWhatIsNotFinite) {
    const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
    for (const auto& text : {format_si(nan), format_bytes(nan), format_fixed(nan, 2), format_percent(nan),
                             format_scientific(nan), format_duration(nan)})
        EXPECT_EQ(text, "nan");
    EXPECT_EQ(format_si(inf), "inf");
    EXPECT_EQ(format_bytes(-inf), "-inf");
    EXPECT_EQ(format_clock(nan), "?");
    EXPECT_EQ(format_clock(inf), "?");
}

TEST(Spread, IsTheMedianWithBothEnds) {
    EXPECT_EQ(spread_of({3, 1, 2}).median, 2);
    EXPECT_EQ(spread_of({4, 1, 2, 3}).median, 2.5);
    EXPECT_EQ(spread_of({4, 1}).min, 1);
    EXPECT_EQ(spread_of({4, 1}).max, 4);
    EXPECT_EQ(spread_of({4, 1}).samples, 2);
    EXPECT_EQ(spread_of({}).median, 0);
    EXPECT_EQ(spread_of({}).samples, 0);
}

TEST(Spread, ADifferenceCountsBeyondTheWiderRange) {
    const Spread narrow{10, 9.9, 10.1, 3}, wide{8, 7, 9, 3}, near{8.1, 7.1, 9.1, 3}, far{2, 2, 2, 3};
    EXPECT_FALSE(resolved(narrow, wide)) << "2 apart, and 2 wide";
    EXPECT_FALSE(resolved(wide, near));
    EXPECT_TRUE(resolved(narrow, far));
    EXPECT_TRUE(resolved(wide, far));
    EXPECT_FALSE(resolved(far, far));
    EXPECT_FALSE(resolved(narrow, {2, 2, 2, 2})) << "two values say nothing of their spread";
    EXPECT_FALSE(resolved({}, {}));
    EXPECT_TRUE(resolved(std::numeric_limits<double>::quiet_NaN(), 1.0)) << "no loss is no noise";
}

TEST(Spread, TextsSayNothingOfNoise) {
    const Spread base{10e-3, 9.9e-3, 10.1e-3, 3}, fast{4e-3, 3.9e-3, 4.1e-3, 3}, noisy{4e-3, 3e-3, 11e-3, 3};
    EXPECT_EQ(ratio_text(base, fast), "2.50x");
    EXPECT_EQ(ratio_text(base, fast, " x"), "2.50 x");
    EXPECT_EQ(ratio_text(base, noisy), "not resolved");
    EXPECT_EQ(ratio_text({1, 1, 1, 3}, {0, 0, 0, 3}), "not resolved");
    EXPECT_EQ(milliseconds(-0.3318), "-331.8");
    EXPECT_EQ(milliseconds(0.01234), "12.34");
}

}  // namespace
}  // namespace fp8flow
