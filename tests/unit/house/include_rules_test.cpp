// SPDX-License-Identifier: MIT
// Holds the rules of the house over the source text: which floor and which room may include which, no cycles,
// how a file opens, how long it may be, how many files a folder holds, which folders have a README, and where
// inline assembly lives. Each rule is also shown a planted violation.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace fp8flow {
namespace {

using Tree = std::map<std::string, std::string>;  // path from the repository root -> text
using Problems = std::vector<std::string>;

constexpr int kMaxLines = 600;
constexpr int kReasonLines = 5;  // "Long because" is in the first lines
constexpr int kMaxSources = 25;  // of a folder
constexpr const char* kLicence = "// SPDX-License-Identifier: MIT\n";

// Folders that hold more than kMaxSources sources, and why.
const std::map<std::string, std::string> kLargeFolders = {
    {"kernels/reference", "one short file an operation family, each a twin of a room of kernels/hopper"},
};

bool under(const std::string& path, const std::string& folder) { return path.starts_with(folder + "/"); }
bool is_header(const std::string& path) { return path.ends_with(".h") || path.ends_with(".cuh"); }
bool is_source(const std::string& path) {
    return is_header(path) || path.ends_with(".cpp") || path.ends_with(".cu");
}
bool is_ours(const std::string& include) {
    return under(include, "kernels") || under(include, "layers") || under(include, "model") ||
           under(include, "bindings") || under(include, "tests");
}

// ---- rooms

const std::string kHopper = "kernels/hopper", kModel = "model";

// Rooms of kernels/hopper and model: what each may include besides its own files and the floors below. An
// entry is a room or one file. Every allowed edge is in these lists, all others are forbidden. A folder that
// the table does not name belongs to the room around it (gemm/sm90 to gemm); kernels/hopper itself is the
// room of its root files only.
using Entries = std::vector<std::string>;
using Rooms = std::map<std::string, Entries>;

Entries operator+(Entries a, const Entries& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

Rooms make_rooms() {
    const std::string& hopper = kHopper;
    // of every operation family
    const Entries family = {hopper + "/device", hopper + "/runtime", hopper + "/factory.h",
                            hopper + "/hopper_ops.h", hopper + "/workspace.h"};
    Rooms rooms = {
        {hopper + "/device", {}},
        // its probe and its stubs define functions of factory.h
        {hopper + "/runtime", {hopper + "/device", hopper + "/factory.h"}},
        // workspace.h holds the state of the two libraries
        {hopper,
         {hopper + "/device", hopper + "/runtime", hopper + "/attention/cudnn.h",
          hopper + "/gemm/cublaslt/cublaslt.h"}},
        {hopper + "/gemm", family},
        {hopper + "/quantize", family},
        {hopper + "/norm", family + Entries{hopper + "/quantize"}},
        {hopper + "/swiglu", family},
        {hopper + "/router", family + Entries{hopper + "/gemm"}},
        {hopper + "/permute", family},
        {hopper + "/attention", family + Entries{hopper + "/norm/dgamma.h"}},  // the norm of heads
        {hopper + "/head", family},
        {hopper + "/optimizer", family + Entries{hopper + "/quantize"}},
        // the stub of builds without NCCL
        {hopper + "/exchange", family + Entries{hopper + "/exchange/peer/regions.h"}},
        {hopper + "/exchange/peer", family + Entries{hopper + "/exchange/merging_weights.h"}},
        {hopper + "/exchange/nccl",
         family + Entries{hopper + "/exchange/peer/regions.h", hopper + "/exchange/merging_weights.h"}},
        {hopper + "/exchange/local", family + Entries{hopper + "/permute"}},
    };

    // model: the trunk, each sees those before it; branches, which do not see each other; report; what the
    // commands run; the commands
    Entries before;
    for (const std::string room : {"safetensors", "config", "base", "data", "train"}) {
        rooms["model/" + room] = before;
        before.push_back("model/" + room);
    }
    const Entries branches = {"model/plan", "model/weights", "model/checkpoint", "model/validate"};
    for (const std::string& room : branches) rooms[room] = before;
    rooms["model/report"] = before + branches;
    before.push_back("model/report");
    rooms["model/bench"] = before;
    rooms["model/profile"] = before + Entries{"model/plan", "model/validate/arms.h"};
    rooms["model/predict"] = before + Entries{"model/plan", "model/validate/arms.h"};
    rooms["model/replay"] = before + Entries{"model/weights"};
    rooms["model/commands"] =
        before + branches + Entries{"model/bench", "model/profile", "model/predict", "model/replay"};
    return rooms;
}
const Rooms kRooms = make_rooms();

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

// The room of a file of kernels/hopper or model; empty for all others and where the table has none.
std::string room_of(const std::string& path) {
    if (folder_of(path) == kHopper) return kHopper;
    std::string folder = folder_of(path);
    while (under(folder, kHopper) || under(folder, kModel)) {
        if (kRooms.contains(folder)) return folder;
        folder = folder_of(folder);
    }
    return "";
}

// Why `file` may not include `include` by their rooms; empty if it may.
std::string forbidden_by_rooms(const std::string& file, const std::string& include) {
    const std::string room = room_of(file), other = room_of(include);
    if (room == kHopper + "/device" && other.empty() && !under(include, "kernels/core") &&
        !under(include, "kernels/ops"))
        return room + " includes only kernels/core and kernels/ops";
    const bool one_floor = under(room + "/", kModel) == under(other + "/", kModel);
    if (room.empty() || other.empty() || room == other || !one_floor) return "";
    for (const std::string& entry : kRooms.at(room))
        if (entry == other || entry == include) return "";
    return room + " may not include " + other;
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
}

// Files named by include lines: every quoted one, and bracketed ones that name a floor.
std::vector<std::string> includes_of(const std::string& text) {
    static const std::regex pattern(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"])");
    std::vector<std::string> includes;
    for (const std::string& line : lines_of(text)) {
        std::smatch match;
        if (line.find("include") == std::string::npos || !std::regex_search(line, match, pattern)) continue;
        if (match[1] == "\"" || is_ours(match[2])) includes.push_back(match[2]);
    }
    return includes;
}

// Why `file` may not include `include`; empty if it may.
std::string forbidden(const std::string& file, const std::string& include) {
    if (!is_ours(include)) return "quoted includes name a file from the repository root";
    if (under(file, "tests"))
        return under(include, "model/main") ? "model/commands/main.cpp is the program" : "";
    if (under(include, "tests")) return "only tests include tests/";
    if (under(include, "bindings") && !under(file, "bindings")) return "bindings/ is the top of the library";
    if (under(file, "bindings") && under(include, "model")) return "bindings/ is a part of the library";
    if (under(file, "kernels") && (under(include, "layers") || under(include, "model"))) {
        return "kernels/ is below layers/ and model/";
    }
    if (under(file, "kernels/core") && !under(include, "kernels/core")) {
        return "kernels/core includes only kernels/core";
    }
    if (under(file, "layers")) {
        if (under(include, "model")) return "layers/ is below model/";
        if (under(include, "kernels/comm") || under(include, "kernels/backends"))
            return "layers/ sees Ops, Exchange and core only";
    }
    for (const std::string backend : {"kernels/reference", "kernels/hopper"}) {
        if (under(include, backend) && !under(file, backend) && !under(file, "kernels/backends") &&
            file != "model/base/backend.cpp") {
            return "only kernels/backends and model/base/backend.cpp name a concrete backend";
        }
    }
    const bool seam = under(file, "kernels/ops") ||
                      (under(file, "kernels") && std::count(file.begin(), file.end(), '/') == 1);
    if (seam && under(include, "kernels/comm")) return "the list of operations is below kernels/comm";
    return forbidden_by_rooms(file, include);
}

void check_includes(const Tree& tree, Problems& problems) {
    for (const auto& [path, text] : tree) {
        if (!is_source(path)) continue;
        for (const std::string& include : includes_of(text)) {
            const std::string reason = forbidden(path, include);
            if (!reason.empty()) problems.push_back(path + " includes " + include + ": " + reason);
            if (is_ours(include) && !tree.contains(include)) {
                problems.push_back(path + " includes " + include + ": no such file");
            }
        }
    }
}

// Depth-first search; `open` is the chain of files being visited.
void visit(const Tree& tree, const std::string& path, std::vector<std::string>& open,
           std::set<std::string>& done, Problems& problems) {
    if (done.contains(path) || !tree.contains(path)) return;
    const auto start = std::find(open.begin(), open.end(), path);
    if (start != open.end()) {
        std::string cycle = "include cycle: ";
        for (auto it = start; it != open.end(); ++it) cycle += *it + " -> ";
        problems.push_back(cycle + path);
        return;
    }
    open.push_back(path);
    for (const std::string& include : includes_of(tree.at(path))) visit(tree, include, open, done, problems);
    open.pop_back();
    done.insert(path);
}

void check_cycles(const Tree& tree, Problems& problems) {
    std::vector<std::string> open;
    std::set<std::string> done;
    for (const auto& [path, text] : tree)
        if (is_source(path)) visit(tree, path, open, done, problems);
}

// Builds without CUDA compile everything but the .cu files and kernels/hopper, and of that the files that say
// why it is not there.
bool built_without_cuda(const std::string& path) {
    const std::string name = path.substr(path.rfind('/') + 1);
    return path.ends_with(".cpp") &&
           (!under(path, kHopper) || name.starts_with("without_") || name == "gpu_visible.cpp");
}

// A header of CUDA or NCCL that `path` reaches, with the file that includes it; empty if there is none.
std::string cuda_header_of(const Tree& tree, const std::string& path, std::set<std::string>& seen) {
    static const std::regex pattern(R"((^|\n)#include <((cu|nccl)[A-Za-z_]*\.h)>)");
    if (!seen.insert(path).second || !tree.contains(path)) return "";
    std::smatch match;
    const std::string& text = tree.at(path);
    if (std::regex_search(text, match, pattern)) return path + " includes " + match[2].str();
    for (const std::string& include : includes_of(text))
        if (const std::string found = cuda_header_of(tree, include, seen); !found.empty()) return found;
    return "";
}

void check_builds_without_cuda(const Tree& tree, Problems& problems) {
    for (const auto& [path, text] : tree) {
        std::set<std::string> seen;
        if (!built_without_cuda(path)) continue;
        const std::string found = cuda_header_of(tree, path, seen);
        if (!found.empty()) problems.push_back(path + ": builds without CUDA compile it, and " + found);
    }
}

void check_texts(const Tree& tree, Problems& problems) {
    static const std::regex assembly(R"((^|[^A-Za-z0-9_])(asm|__asm__)\s*(volatile|__volatile__)?\s*[({])");
    for (const auto& [path, text] : tree) {
        if (!is_source(path)) continue;
        const std::vector<std::string> lines = lines_of(text);
        if (!text.starts_with(kLicence))
            problems.push_back(path + ": opens without the line SPDX-License-Identifier: MIT");
        else if (!text.starts_with(std::string(kLicence) + "// "))
            problems.push_back(path + ": opens without a comment on what it holds and why");
        if (is_header(path) && text.find("\n#pragma once\n") == std::string::npos) {
            problems.push_back(path + ": no #pragma once");
        }
        bool reason = false;
        for (int i = 0; i < std::min<int>(kReasonLines, static_cast<int>(lines.size())); ++i) {
            reason = reason || lines[i].find("Long because") != std::string::npos;
        }
        if (lines.size() > kMaxLines && !reason) {
            problems.push_back(path + ": " + std::to_string(lines.size()) +
                               " lines without a 'Long because' at the top");
        }
        // In two parts, so that this file obeys it.
        if (text.find(std::string("}") + "th ") != std::string::npos)
            problems.push_back(path + ": a number before \"th\" is wrong for 1, 2 and 3");
        if (under(path, "kernels/hopper/device")) continue;
        for (const std::string& line : lines) {
            const std::string code = line.substr(0, line.find("//"));
            if (code.find("asm") != std::string::npos && std::regex_search(code, assembly)) {
                problems.push_back(path + ": inline assembly outside kernels/hopper/device: " + line);
            }
        }
    }
}

// Folders are of a reader's size; those of kernels/hopper and model are rooms that the table knows.
void check_folders(const Tree& tree, Problems& problems) {
    std::map<std::string, int> sources;
    for (const auto& [path, text] : tree)
        if (is_source(path)) ++sources[folder_of(path)];
    for (const auto& [folder, count] : sources) {
        if (count > kMaxSources && !kLargeFolders.contains(folder)) {
            problems.push_back(folder + ": " + std::to_string(count) + " sources, at most " +
                               std::to_string(kMaxSources) + " are one room");
        }
        const bool has_rooms = under(folder + "/", kHopper) || under(folder + "/", kModel);
        if (has_rooms && room_of(folder + "/").empty())
            problems.push_back(folder + ": no room that kRooms knows");
    }
}

// Every room says on one page what it holds; the rooms of the exchange share one.
void check_pages(const Tree& tree, Problems& problems) {
    std::set<std::string> missing;
    for (const auto& [path, text] : tree) {
        std::string room = is_source(path) ? room_of(path) : "";
        if (under(room, kHopper + "/exchange")) room = kHopper + "/exchange";
        if (!room.empty() && !tree.contains(room + "/README.md")) missing.insert(room);
    }
    for (const std::string& room : missing) problems.push_back(room + ": no README.md");
}

Problems problems_of(const Tree& tree) {
    Problems problems;
    check_includes(tree, problems);
    check_cycles(tree, problems);
    check_builds_without_cuda(tree, problems);
    check_texts(tree, problems);
    check_folders(tree, problems);
    return problems;
}

Tree read_repository() {
    namespace fs = std::filesystem;
    Tree tree;
    const fs::path root = FP8FLOW_SOURCE_DIR;
    for (const char* floor : {"kernels", "layers", "bindings", "model", "tests"}) {
        if (!fs::exists(root / floor)) continue;
        for (const auto& entry : fs::recursive_directory_iterator(root / floor)) {
            const std::string path = entry.path().lexically_relative(root).generic_string();
            const bool is_page = entry.path().filename() == "README.md";
            if (!entry.is_regular_file() || (!is_source(path) && !is_page)) continue;
            std::ifstream file(entry.path(), std::ios::binary);
            std::ostringstream text;
            text << file.rdbuf();
            tree[path] = text.str();
        }
    }
    return tree;
}

TEST(IncludeRules, HoldInTheRepository) {
    const Tree tree = read_repository();
    ASSERT_GT(tree.size(), 10u);
    for (const std::string& problem : problems_of(tree)) ADD_FAILURE() << problem;
}

TEST(IncludeRules, EveryRoomHasAPage) {
    const Tree tree = read_repository();
    Problems problems;
    check_pages(tree, problems);
    for (const std::string& problem : problems) ADD_FAILURE() << problem;

    const std::string inside = "kernels/hopper/exchange/peer/a.h",
                      outer = "kernels/hopper/exchange/README.md";
    for (const std::string page : {"model/plan/README.md", outer.c_str()}) {
        const std::string source = page == outer ? inside : "model/plan/a.h";
        Problems none, one;
        check_pages({{source, ""}, {page, ""}}, none);
        check_pages({{source, ""}}, one);
        EXPECT_TRUE(none.empty());
        ASSERT_EQ(one.size(), 1u);
        EXPECT_EQ(one[0], folder_of(page) + ": no README.md");
    }
}

// An entry that names nothing would allow an edge that nobody can see.
TEST(IncludeRules, RoomsNameWhatIsThere) {
    const Tree tree = read_repository();
    std::set<std::string> folders;
    for (const auto& [path, text] : tree) folders.insert(folder_of(path));
    for (const auto& [room, entries] : kRooms) {
        EXPECT_TRUE(folders.contains(room)) << room;
        for (const std::string& entry : entries)
            EXPECT_TRUE(folders.contains(entry) || tree.contains(entry)) << room << " lists " << entry;
    }
    for (const auto& [folder, reason] : kLargeFolders) EXPECT_TRUE(folders.contains(folder)) << folder;
}

// A header that breaks no rule by itself; includes are added by the cases below.
std::string header(const std::vector<std::string>& includes) {
    std::string text = std::string(kLicence) + "// What it holds.\n#pragma once\n";
    for (const std::string& include : includes) text += "#include \"" + include + "\"\n";
    return text;
}

struct Planted {
    std::string name;
    Tree tree;
    std::string expected;  // part of the only problem; empty: none
};

class PlantedViolation : public testing::TestWithParam<Planted> {};

TEST_P(PlantedViolation, IsFound) {
    const Problems problems = problems_of(GetParam().tree);
    if (GetParam().expected.empty()) {
        EXPECT_TRUE(problems.empty()) << problems.front();
        return;
    }
    ASSERT_EQ(problems.size(), 1u) << testing::PrintToString(problems);
    EXPECT_NE(problems[0].find(GetParam().expected), std::string::npos) << problems[0];
}

// The tree with one file that includes another, both otherwise in order.
Tree pair(const std::string& file, const std::string& include) {
    return {{file, header({include})}, {include, header({})}};
}

std::vector<Planted> planted() {
    const std::string keyword = "as";  // in two parts, so that this file obeys the rule on assembly
    const std::string cuda = "#include <cuda_runtime.h>\n";
    const std::string assembly = header({}) + "void f() { " + keyword + "m volatile(\"nop;\"); }\n";
    std::string lengthy = header({});
    for (int i = 0; i < kMaxLines; ++i) lengthy += "int x;\n";
    Tree crowded;
    for (int i = 0; i <= kMaxSources; ++i) crowded["layers/a" + std::to_string(i) + ".h"] = header({});
    return {
        {"clean", pair("model/base/a.h", "layers/b.h"), ""},
        {"kernel_sees_layer", pair("kernels/ops/a.h", "layers/b.h"), "is below layers"},
        {"kernel_sees_model", pair("kernels/comm/a.h", "model/base/b.h"), "is below layers"},
        {"binding_sees_layer", pair("bindings/a.h", "layers/b.h"), ""},
        {"binding_sees_model", pair("bindings/a.h", "model/base/b.h"), "part of the library"},
        {"binding_sees_reference", pair("bindings/a.h", "kernels/reference/b.h"), "concrete backend"},
        {"layer_sees_binding", pair("layers/a.h", "bindings/b.h"), "top of the library"},
        {"layer_sees_model", pair("layers/a.h", "model/base/b.h"), "layers/ is below"},
        {"layer_sees_reference", pair("layers/flows/a.h", "kernels/reference/b.h"), "concrete backend"},
        {"layer_sees_hopper", pair("layers/a.h", "kernels/hopper/b.h"), "concrete backend"},
        {"layer_sees_comm", pair("layers/a.h", "kernels/comm/b.h"), "Ops, Exchange and core"},
        {"layer_sees_backends", pair("layers/a.h", "kernels/backends/b.h"), "Ops, Exchange and core"},
        {"backends_see_backend", pair("kernels/backends/a.cpp", "kernels/hopper/b.h"), ""},
        {"layer_sees_ops", pair("layers/a.h", "kernels/ops.h"), ""},
        {"core_sees_ops", pair("kernels/core/a.h", "kernels/ops.h"), "only kernels/core"},
        {"ops_see_comm", pair("kernels/exchange.h", "kernels/comm/b.h"), "is below kernels/comm"},
        {"model_sees_backend", pair("model/train/trainer.cpp", "kernels/reference/b.h"), "concrete backend"},
        {"backend_sees_backend", pair("model/base/backend.cpp", "kernels/hopper/b.h"), ""},
        {"reference_sees_hopper", pair("kernels/reference/a.h", "kernels/hopper/b.h"), "concrete backend"},
        {"test_sees_backend", pair("tests/unit/a_test.cpp", "kernels/reference/b.h"), ""},
        {"model_sees_tests", pair("model/base/a.h", "tests/support/b.h"), "only tests"},
        {"relative_include", {{"model/base/a.h", header({"b.h"})}}, "from the repository root"},
        {"ordinal",
         {{"model/base/a.h", header({}) + "auto text = fmt::format(\"the {}" + "th time\", n);\n"}},
         "wrong for 1, 2 and 3"},
        {"missing_file", {{"model/base/a.h", header({"model/base/b.h"})}}, "no such file"},
        {"cycle",
         {{"model/base/a.h", header({"model/base/b.h"})},
          {"model/base/b.h", header({"model/base/c.h"})},
          {"model/base/c.h", header({"model/base/a.h"})}},
         "include cycle: model/base/a.h -> model/base/b.h -> "
         "model/base/c.h -> model/base/a.h"},
        {"stub_sees_cuda",
         {{"kernels/hopper/attention/without_it.cpp", header({"kernels/hopper/device/a.h"})},
          {"kernels/hopper/device/a.h", header({}) + cuda}},
         "kernels/hopper/device/a.h includes cuda_runtime.h"},
        {"kernel_sees_cuda",
         {{"kernels/hopper/attention/with_it.cpp", header({"kernels/hopper/device/a.h"})},
          {"kernels/hopper/device/a.h", header({}) + cuda}},
         ""},
        {"no_comment", {{"model/base/a.cpp", std::string(kLicence) + "int x;\n"}}, "without a comment"},
        {"no_licence", {{"model/base/a.cpp", "// What it holds.\nint x;\n"}}, "SPDX"},
        {"no_pragma",
         {{"model/base/a.h", std::string(kLicence) + "// What it holds.\nint x;\n"}},
         "no #pragma once"},
        {"too_long", {{"model/base/a.h", lengthy}}, "Long because"},
        {"long_with_reason",
         {{"model/base/a.h", std::string(kLicence) + "// Long because it is a table.\n" + lengthy}},
         ""},
        {"device_sees_core", pair("kernels/hopper/device/a.h", "kernels/core/b.h"), ""},
        {"device_sees_contract", pair("kernels/hopper/device/a.h", "kernels/ops/b.h"), ""},
        {"device_sees_exchange", pair("kernels/hopper/device/a.h", "kernels/exchange.h"),
         "only kernels/core"},
        {"device_sees_runtime", pair("kernels/hopper/device/a.h", "kernels/hopper/runtime/b.h"),
         "device may not include"},
        {"runtime_sees_device", pair("kernels/hopper/runtime/a.h", "kernels/hopper/device/b.h"), ""},
        {"runtime_sees_family", pair("kernels/hopper/runtime/a.h", "kernels/hopper/gemm/b.h"),
         "runtime may not include"},
        {"family_sees_root", pair("kernels/hopper/swiglu/a.cu", "kernels/hopper/workspace.h"), ""},
        {"family_sees_family", pair("kernels/hopper/swiglu/a.cu", "kernels/hopper/norm/b.h"),
         "swiglu may not include kernels/hopper/norm"},
        {"norm_sees_quantize", pair("kernels/hopper/norm/a.cu", "kernels/hopper/quantize/b.h"), ""},
        {"quantize_sees_norm", pair("kernels/hopper/quantize/a.cu", "kernels/hopper/norm/b.h"),
         "quantize may not include"},
        {"folder_of_a_room", pair("kernels/hopper/gemm/sm90/a.cu", "kernels/hopper/gemm/b.h"), ""},
        {"router_sees_gemm", pair("kernels/hopper/router/a.cu", "kernels/hopper/gemm/sm90/b.h"), ""},
        {"local_sees_permute", pair("kernels/hopper/exchange/local/a.cu", "kernels/hopper/permute/b.h"), ""},
        {"nccl_sees_regions",
         pair("kernels/hopper/exchange/nccl/a.cu", "kernels/hopper/exchange/peer/regions.h"), ""},
        {"nccl_sees_protocol",
         pair("kernels/hopper/exchange/nccl/a.cu", "kernels/hopper/exchange/peer/group.h"),
         "nccl may not include"},
        {"train_sees_data", pair("model/train/a.h", "model/data/b.h"), ""},
        {"data_sees_train", pair("model/data/a.h", "model/train/b.h"), "data may not include model/train"},
        {"branch_sees_branch", pair("model/weights/a.h", "model/plan/b.h"), "weights may not include"},
        {"report_sees_plan", pair("model/report/a.h", "model/plan/b.h"), ""},
        {"profile_sees_arms", pair("model/profile/a.h", "model/validate/arms.h"), ""},
        {"profile_sees_validate", pair("model/profile/a.h", "model/validate/b.h"), "profile may not include"},
        {"bench_sees_weights", pair("model/bench/a.h", "model/weights/b.h"), "bench may not include"},
        {"nobody_sees_commands", pair("model/bench/a.h", "model/commands/b.h"), "bench may not include"},
        {"unknown_room", {{"model/attic/a.h", header({})}}, "no room"},
        {"root_of_model", {{"model/a.h", header({})}}, "no room"},
        {"too_many_files", crowded, "26 sources"},
        {"assembly_elsewhere", {{"kernels/hopper/a.h", assembly}}, "inline assembly"},
        {"assembly_in_place", {{"kernels/hopper/device/a.h", assembly}}, ""},
    };
}

INSTANTIATE_TEST_SUITE_P(IncludeRules, PlantedViolation, testing::ValuesIn(planted()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fp8flow
