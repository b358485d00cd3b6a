// SPDX-License-Identifier: MIT
// Bad safetensors files and indices made by hand: each is refused with a message of its own that names the
// file, before anything of the claimed size is allocated. And files cut or changed at every single byte: read
// in full or refused, never anything else.
#include "model/safetensors/tensor_set.h"

#include "tests/support/files.h"
#include "tests/support/safetensors_bytes.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include <set>

namespace fp8flow {
namespace {

struct BadFile {
    std::string name;
    std::string bytes;
    std::string expected;  // part of the message
};

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}
// A file with one tensor "a" of the given body, and four bytes of data.
std::string one(const std::string& body) { return safetensors_bytes("{\"a\":" + body + "}", "abcd"); }
std::string two(const std::string& a, const std::string& b) {
    return safetensors_bytes("{\"a\":" + a + ",\"b\":" + b + "}", "abcd");
}

std::vector<BadFile> bad_files() {
    const std::string good = tensor("U8", "[4]", "[0,4]");
    const std::string nested(100000, '[');
    return {
        // the length in front
        {"empty", "", "0 bytes are too few"},
        {"seven_bytes", "1234567", "7 bytes are too few"},
        {"no_header", safetensors_bytes("", ""), "does not begin with '{'"},
        {"header_cut_off", safetensors_bytes("{}", "", 3), "claims a header of 3 bytes, only 2 follow"},
        {"header_too_long", safetensors_bytes("{}", "", (16 << 20) + 1), "claim a header of 16777217 bytes"},
        {"header_of_2_to_63", std::string("\0\0\0\0\0\0\0\x80{}", 10),
         "claim a header of 9223372036854775808 bytes"},
        {"header_of_all_ones", std::string(8, '\xFF') + "{}", "claim a header of 18446744073709551615 bytes"},
        {"a_pickle", std::string("PK\x03\x04\x14\0\0\0 rest of an archive", 26), "no safetensors file"},
        // the text
        {"starts_with_space", safetensors_bytes(" {}", ""), "does not begin with '{'"},
        {"a_list", safetensors_bytes("[]", ""), "does not begin with '{'"},
        {"open_object", safetensors_bytes("{\"a\":", ""), "no JSON at byte"},
        {"second_document", safetensors_bytes("{}{}", ""), "no JSON at byte 3"},
        {"zeros_after", safetensors_bytes(std::string("{}\0\0", 4), ""), "has a zero byte"},
        {"no_utf8", safetensors_bytes("{\"\xC3\x28\":" + good + "}", "abcd"), "no JSON at byte"},
        {"comment", safetensors_bytes("{/**/}", ""), "no JSON at byte 2"},
        {"deep_nesting", safetensors_bytes("{\"a\":" + nested, ""), "nested deeper than 64"},
        {"deep_in_shape", one("{\"dtype\":\"U8\",\"shape\":" + nested), "nested deeper than 64"},
        // names
        {"empty_name", safetensors_bytes("{\"\":" + good + "}", "abcd"), "a tensor is named \"\""},
        {"name_with_escape", safetensors_bytes("{\"a\\u001b[2J\":" + good + "}", "abcd"),
         "a tensor is named \"a\\x1b[2J\""},
        {"long_name", safetensors_bytes("{\"" + std::string(1025, 'n') + "\":" + good + "}", "abcd"),
         "nnn...\": a name"},
        {"tensor_twice", safetensors_bytes("{\"a\":" + good + ",\"a\":" + good + "}", "abcd"),
         "key \"a\" appears twice"},
        {"tensor_twice_escaped", safetensors_bytes("{\"a\":" + good + ",\"\\u0061\":" + good + "}", "abcd"),
         "key \"a\" appears twice"},
        // metadata
        {"metadata_twice", safetensors_bytes(R"({"__metadata__":{},"__metadata__":{}})", ""),
         "\"__metadata__\" appears twice"},
        {"metadata_key_twice", safetensors_bytes(R"({"__metadata__":{"k":"1","k":"2"}})", ""),
         "key \"k\" appears twice"},
        {"metadata_number", safetensors_bytes(R"({"__metadata__":{"k":1}})", ""),
         "__metadata__ \"k\" is a number, want text"},
        {"metadata_object", safetensors_bytes(R"({"__metadata__":{"k":{}}})", ""),
         "__metadata__ \"k\" is an object"},
        {"metadata_text", safetensors_bytes(R"({"__metadata__":"pt"})", ""),
         "__metadata__ is text, want an object"},
        // one tensor
        {"tensor_is_null", one("null"), "\"a\" is null, want an object"},
        {"tensor_is_number", one("7"), "\"a\" is a number, want an object"},
        {"unknown_key", one("{\"dtyp\":\"U8\"}"), "tensor \"a\": unknown key \"dtyp\""},
        {"key_twice", one("{\"dtype\":\"U8\",\"dtype\":\"U8\"}"), "key \"dtype\" appears twice"},
        {"no_dtype", one("{\"shape\":[4],\"data_offsets\":[0,4]}"), "tensor \"a\": \"dtype\" is missing"},
        {"no_shape", one("{\"dtype\":\"U8\",\"data_offsets\":[0,4]}"), "tensor \"a\": \"shape\" is missing"},
        {"no_offsets", one("{\"dtype\":\"U8\",\"shape\":[4]}"), "tensor \"a\": \"data_offsets\" is missing"},
        {"dtype_is_number", one("{\"dtype\":8}"), "tensor \"a\": dtype is a number, want text"},
        {"dtype_is_list", one("{\"dtype\":[\"U8\"]}"), "tensor \"a\": dtype is a list, want text"},
        {"unknown_dtype", one(tensor("U7", "[4]", "[0,4]")), "dtype \"U7\" is not supported"},
        {"four_bit_dtype", one(tensor("F4", "[8]", "[0,4]")), "dtype \"F4\" is not supported"},
        {"lower_case_dtype", one(tensor("u8", "[4]", "[0,4]")), "dtype \"u8\" is not supported"},
        {"shape_is_text", one("{\"shape\":\"4\"}"), "tensor \"a\": shape is text, want a list of integers"},
        {"shape_is_object", one("{\"shape\":{}}"), "tensor \"a\": shape is an object"},
        {"negative_dimension", one(tensor("U8", "[-4]", "[0,4]")), "shape holds -4, want integers"},
        {"fractional_dimension", one(tensor("U8", "[4.5]", "[0,4]")), "shape holds 4.5, want integers"},
        {"exponent_dimension", one(tensor("U8", "[4e0]", "[0,4]")), "shape holds 4.0, want integers"},
        {"dimension_of_2_to_63", one(tensor("U8", "[9223372036854775808]", "[0,4]")),
         "shape holds 9223372036854775808"},
        {"dimension_of_2_to_64", one(tensor("U8", "[18446744073709551616]", "[0,4]")),
         "shape holds 1.8446744073709552e+19"},
        {"dimension_is_text", one(tensor("U8", "[\"4\"]", "[0,4]")), "shape holds text, want integers"},
        {"dimension_is_null", one(tensor("U8", "[null]", "[0,4]")), "shape holds null, want integers"},
        {"nine_dimensions", one(tensor("U8", "[1,1,1,1,1,1,1,1,4]", "[0,4]")),
         "shape has 9 numbers, want at most 8"},
        {"product_overflows", one(tensor("U8", "[4294967296,4294967296]", "[0,4]")),
         "more bytes than 63 bits"},
        {"product_wraps_to_4", one(tensor("F32", "[4611686018427387905]", "[0,4]")),
         "more bytes than 63 bits"},
        {"overflow_hidden_by_zero", one(tensor("U8", "[9223372036854775807,2,0]", "[0,0]")),
         "more bytes than 63 bits"},
        {"one_offset", one(tensor("U8", "[4]", "[0]")), "data_offsets has 1 numbers, want 2"},
        {"three_offsets", one(tensor("U8", "[4]", "[0,4,4]")), "data_offsets has 3 numbers, want at most 2"},
        {"negative_offset", one(tensor("U8", "[4]", "[-1,3]")), "data_offsets holds -1, want integers"},
        {"offsets_swapped", one(tensor("U8", "[4]", "[4,0]")), "data_offsets begin at 4 and end at 0"},
        {"end_outside", one(tensor("U8", "[5]", "[0,5]")), "ends at byte 5 of the data, the file has 4"},
        {"end_far_outside", one(tensor("U8", "[9223372036854775807]", "[0,9223372036854775807]")),
         "ends at byte 9223372036854775807 of the data"},
        {"shape_too_small", one(tensor("U8", "[3]", "[0,4]")), "data_offsets span 4 bytes, U8[3] takes 3"},
        {"shape_too_large", one(tensor("F32", "[2]", "[0,4]")), "data_offsets span 4 bytes, F32[2] takes 8"},
        {"scalar_too_small", one(tensor("F32", "[]", "[0,2]")), "data_offsets span 2 bytes, F32[] takes 4"},
        // tensors together
        {"gap_in_front", one(tensor("U8", "[3]", "[1,4]")), "bytes 0 to 0 belong to no tensor"},
        {"gap_between", two(tensor("U8", "[1]", "[0,1]"), tensor("U8", "[2]", "[2,4]")),
         "bytes 1 to 1 belong to no tensor"},
        {"overlap", two(tensor("U8", "[3]", "[0,3]"), tensor("U8", "[2]", "[2,4]")),
         "tensor \"b\" begins at byte 2 inside tensor \"a\", which ends at 3"},
        {"same_place", two(tensor("U8", "[4]", "[0,4]"), tensor("I32", "[1]", "[0,4]")),
         "tensor \"b\" begins at byte 0 inside tensor \"a\""},
        {"empty_inside", two(tensor("U8", "[4]", "[0,4]"), tensor("U8", "[0]", "[2,2]")),
         "tensor \"b\" begins at byte 2 inside"},
        {"bytes_after", one(tensor("U8", "[3]", "[0,3]")), "1 bytes after the last tensor"},
        {"data_without_tensor", safetensors_bytes("{}", "abcd"), "4 bytes after the last tensor"},
    };
}

TEST(SafetensorsHostile, EachBadFileIsRefusedWithItsOwnMessage) {
    const TemporaryFolder folder;
    std::set<std::string> names, messages;
    for (const BadFile& bad : bad_files()) {
        SCOPED_TRACE(bad.name);
        const std::string path = folder.write(bad.name + ".safetensors", bad.bytes);
        std::string message = error_of(ExitCode::data, [&] { SafetensorsFile file(path); });
        EXPECT_TRUE(message.starts_with(path + ": ")) << message;
        expect_contains(message, bad.expected);
        EXPECT_LT(message.size(), path.size() + 500u) << message;
        messages.insert(message.substr(path.size()));
        EXPECT_TRUE(names.insert(bad.name).second);
    }
    EXPECT_GE(names.size(), 60u);
    EXPECT_GE(messages.size(), names.size() - 6);  // a few differ only in the file's name
}

TEST(SafetensorsHostile, WhatIsNoFileIsRefused) {
    const TemporaryFolder folder;
    const auto refused = [&](const std::string& name) {
        return error_of(ExitCode::data, [&] { SafetensorsFile file(folder.path(name)); });
    };
    expect_contains(refused("absent.safetensors"), "absent.safetensors: No such file");
    std::filesystem::create_directory(folder.path("folder.safetensors"));
    expect_contains(refused("folder.safetensors"), "not a regular file");
    ASSERT_EQ(::mkfifo(folder.path("pipe.safetensors").c_str(), 0600), 0);
    expect_contains(refused("pipe.safetensors"), "not a regular file");
}

struct BadIndex {
    std::string name;
    std::string text;
    std::string expected;
};

TEST(SafetensorsHostile, EachBadIndexIsRefusedWithItsOwnMessage) {
    const auto to = [](const std::string& file) { return "{\"weight_map\":{\"a\":" + file + "}}"; };
    const std::vector<BadIndex> bad = {
        {"empty", "", "no JSON at byte"},
        {"no_json", "weight_map", "no JSON at byte"},
        {"a_list", "[]", "is a list, want an object"},
        {"a_number", "7", "is a number, want an object"},
        {"no_map", "{\"metadata\":{}}", "has no weight_map"},
        {"empty_map", "{\"weight_map\":{}}", "weight_map is empty"},
        {"map_is_list", "{\"weight_map\":[]}", "weight_map is a list"},
        {"map_is_null", "{\"weight_map\":null}", "weight_map is null"},
        {"map_twice", "{\"weight_map\":{},\"weight_map\":{}}", "\"weight_map\" appears twice"},
        {"tensor_twice", "{\"weight_map\":{\"a\":\"m.safetensors\",\"a\":\"m.safetensors\"}}",
         "key \"a\" appears twice"},
        {"empty_name", "{\"weight_map\":{\"\":\"m.safetensors\"}}", "a tensor is named \"\""},
        {"file_is_number", to("1"), "the file of tensor \"a\" is a number"},
        {"file_is_list", to("[\"m.safetensors\"]"), "the file of tensor \"a\" is a list"},
        {"file_is_object", to("{}"), "the file of tensor \"a\" is an object"},
        {"parent_folder", to("\"../m.safetensors\""), "is said to be in \"../m.safetensors\""},
        {"absolute", to("\"/etc/m.safetensors\""), "is said to be in \"/etc/m.safetensors\""},
        {"below", to("\"sub/m.safetensors\""), "is said to be in \"sub/m.safetensors\""},
        {"backslash", to("\"..\\\\m.safetensors\""), "is said to be in \"..\\m.safetensors\""},
        {"hidden", to("\".safetensors\""), "is said to be in \".safetensors\""},
        {"hidden_name", to("\".m.safetensors\""), "is said to be in \".m.safetensors\""},
        {"zero_byte", to("\"m\\u0000.safetensors\""), "is said to be in \"m\\x00.safetensors\""},
        {"other_ending", to("\"passwd\""), "is said to be in \"passwd\""},
        {"long_name", to("\"" + std::string(300, 'm') + ".safetensors\""), "mmm...\"; an index"},
        {"deep_metadata", "{\"metadata\":" + std::string(100000, '['), "nested deeper than 64"},
    };
    const TemporaryFolder folder;
    std::set<std::string> messages;
    for (const BadIndex& index : bad) {
        SCOPED_TRACE(index.name);
        const std::string path = folder.write(index.name + ".json", index.text);
        const std::string message = error_of(ExitCode::data, [&] { TensorSet set(path); });
        EXPECT_TRUE(message.starts_with(path + ": ")) << message;
        expect_contains(message, index.expected);
        messages.insert(message);
    }
    EXPECT_EQ(messages.size(), bad.size());
    expect_contains(error_of(ExitCode::data, [&] { TensorSet set(folder.path("absent.json")); }),
                    "absent.json: ");
}

// Whatever a file holds: it is read, and then all its bytes are there to be read, or it is refused.
void expect_read_or_refused(const std::string& text, int64_t file_bytes) {
    try {
        const SafetensorsHeader header = parse_header(text, file_bytes, "f", ExitCode::data);
        int64_t covered = 0;
        for (const TensorEntry& entry : header.tensors) {
            EXPECT_EQ(entry.begin, covered);
            EXPECT_EQ(entry.bytes(), checked_bytes(entry.dtype, entry.shape).value_or(-1));
            covered = entry.end;
        }
        EXPECT_EQ(covered, header.data_bytes);
        EXPECT_EQ(header.data_start + header.data_bytes, file_bytes);
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    }
}

TEST(SafetensorsHostile, EveryCutAndEveryChangedByteIsReadOrRefused) {
    const std::string header = R"({"__metadata__":{"format":"pt"},"a":)" + tensor("BF16", "[2,1]", "[0,4]") +
                               ",\"b\":" + tensor("F8_E4M3", "[3]", "[4,7]") + "}";
    const auto data_bytes = int64_t{7};
    for (size_t length = 0; length <= header.size(); ++length) {
        const auto cut = static_cast<int64_t>(length);
        expect_read_or_refused(header.substr(0, length), 8 + cut + data_bytes);
        expect_read_or_refused(header.substr(0, length), 8 + cut);
    }
    for (size_t at = 0; at < header.size(); ++at)
        for (int value = 0; value < 256; ++value) {
            std::string changed = header;
            changed[at] = static_cast<char>(value);
            expect_read_or_refused(changed, 8 + static_cast<int64_t>(header.size()) + data_bytes);
        }
}

}  // namespace
}  // namespace fp8flow
