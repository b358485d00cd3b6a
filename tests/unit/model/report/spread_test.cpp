// SPDX-License-Identifier: MIT
// Medians with both ends, and which differences of them say something.
#include "model/report/spread.h"

#include <gtest/gtest.h>

#include <limits>

namespace fp8flow::report {
namespace {

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
    EXPECT_EQ(percent_text(base, fast), "-60.0 %");
    EXPECT_EQ(milliseconds_text(base, fast, " ms"), "6.000 ms");
    EXPECT_EQ(milliseconds_text(fast, base), "-6.000");
    for (const std::string& text :
         {ratio_text(base, noisy), percent_text(base, noisy), milliseconds_text(base, noisy, " ms"),
          ratio_text({1, 1, 1, 3}, {0, 0, 0, 3}), percent_text({0, 0, 0, 3}, {1, 1, 1, 3})})
        EXPECT_EQ(text, "not resolved");
    EXPECT_EQ(milliseconds(-0.3318), "-331.8");
    EXPECT_EQ(milliseconds(0.01234), "12.34");
}

}  // namespace
}  // namespace fp8flow::report
