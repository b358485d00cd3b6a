// SPDX-License-Identifier: MIT
// Loading, calling and comparing.
#include "model/bench/plugin.h"

#include "kernels/core/scalar_math.h"
#include "kernels/ops/fields.h"
#include "model/base/plugins.h"
#include "model/safetensors/header.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

namespace fp8flow::bench {

namespace {

struct Number {
    std::string name;
    double value;
};

// Lists the tensors and numbers of arguments, those of nested structs too.
class Parts {
public:
    std::vector<NamedTensor> tensors;
    std::vector<Number> numbers;

    template <class Args> void add_all(const Args& args, const std::string& prefix = {}) {
        op::each_field(args, [&](const char* name, const auto& member) { add(prefix + name, member); });
    }

private:
    void add(const std::string& name, const TensorView& view, const std::string& layout = {}) {
        if (view) tensors.push_back({name, view, layout});
    }
    void add(const std::string& name, const ScaledTensor& tensor) {
        if (!tensor) return;
        add(name, tensor.data);
        add(name + ".scales", tensor.scales,
            fmt::format("{} {}", name_of(tensor.layout), name_of(tensor.format)));
        add(name + ".layout", tensor.layout);
        add(name + ".format", tensor.format);
    }
    void add(const std::string& name, const RowGroups& groups) {
        if (groups.num_groups == 0) return;
        add(name + ".counts", groups.counts);
        add(name + ".offsets", groups.offsets);
        add(name + ".num_groups", groups.num_groups);
        add(name + ".row_capacity", groups.row_capacity);
        add(name + ".alignment", groups.alignment);
    }
    void add(const std::string& name, const StochasticRounding& rounding) {
        add(name + ".key", rounding.step_key());
        add(name + ".first", rounding.first);
    }
    void add(const std::string&, const int64_t*) {}  // words of a layer's rows and of a step: bench has none
    template <class Item, size_t N> void add(const std::string& name, const std::array<Item, N>& items) {
        for (size_t i = 0; i < N; ++i) add_all(items[i], name + "." + std::to_string(i) + ".");
    }
    template <op::HasFields Args> void add(const std::string& name, const Args& args) {
        add_all(args, name + ".");
    }
    template <class Scalar>
    requires(std::is_arithmetic_v<Scalar> || std::is_enum_v<Scalar>) void add(const std::string& name,
                                                                              Scalar value) {
        numbers.push_back({name, static_cast<double>(value)});
    }
};

// The arguments of one call as the library sees them. The C structs point into the other members.
struct Prepared {
    template <class Args> Prepared(const char* operation, const Args& args, bool gpu) {
        parts.add_all(args);
        for (const NamedTensor& tensor : parts.tensors) {
            const TensorView& view = tensor.view;
            tensors.push_back({tensor.name.c_str(), view.data, name_of(view.dtype), view.rank, {}});
            std::copy_n(view.dims, view.rank, tensors.back().dims);
        }
        for (const Number& number : parts.numbers) numbers.push_back({number.name.c_str(), number.value});
        call = {.operation = operation,
                .tensors = tensors.data(),
                .numbers = numbers.data(),
                .num_tensors = static_cast<int32_t>(tensors.size()),
                .num_numbers = static_cast<int32_t>(numbers.size()),
                .on_gpu = gpu ? 1 : 0,
                .stream = nullptr};
    }
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;

    Parts parts;
    std::vector<fp8flow_plugin_tensor> tensors;
    std::vector<fp8flow_plugin_number> numbers;
    fp8flow_plugin_call call;
};

template <class Args>
Plugin::Call prepared_call(fp8flow_plugin_run run, const char* operation, const Args& args, bool gpu) {
    const auto prepared = std::make_shared<Prepared>(operation, args, gpu);
    std::vector<std::string> numbers;
    for (const Number& number : prepared->parts.numbers)
        numbers.push_back(fmt::format("{} {:.12g}", number.name, number.value));
    return {[prepared, run](const Launch& launch) {
                prepared->call.stream = launch.stream.handle;
                const int status = run(&prepared->call);
                require(status == 0, ExitCode::usage, "returned {}", status);
            },
            prepared->parts.tensors, std::move(numbers)};
}

double value_at(const uint8_t* data, int64_t i, DType dtype) {
    switch (dtype) {
        case DType::f32: return reinterpret_cast<const float*>(data)[i];
        case DType::bf16: return to_float(reinterpret_cast<const Bf16*>(data)[i]);
        case DType::f16: return to_float(reinterpret_cast<const Fp16*>(data)[i]);
        case DType::f64: return reinterpret_cast<const double*>(data)[i];
        default: return 0;
    }
}

// Empty: the same bytes.
std::string difference(const uint8_t* ours, const uint8_t* theirs, const TensorView& view) {
    if (std::equal(ours, ours + view.bytes(), theirs)) return {};
    const int64_t width = size_of(view.dtype), n = view.numel();
    int64_t different = 0;
    double squares = 0, error = 0;
    for (int64_t i = 0; i < n; ++i) {
        different += !std::equal(ours + i * width, ours + (i + 1) * width, theirs + i * width);
        const double a = value_at(ours, i, view.dtype), b = value_at(theirs, i, view.dtype);
        if (std::isfinite(a)) {
            squares += a * a;
            error += (b - a) * (b - a);
        }
    }
    const bool real = view.dtype == DType::f32 || view.dtype == DType::bf16 || view.dtype == DType::f16 ||
                      view.dtype == DType::f64;
    const std::string count = fmt::format("{} of {} values", different, n);
    if (!real) return count;
    return std::isfinite(error) && squares > 0 ? fmt::format("nmse {:.1e} ({})", error / squares, count)
                                               : count + ", not finite";
}

std::vector<std::string> known_operations() {
    std::vector<std::string> known;
#define FP8FLOW_NAME(name, Args) known.push_back(#name);
    FP8FLOW_FOR_EACH_OP(FP8FLOW_NAME)
    FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_NAME)
#undef FP8FLOW_NAME
    return known;
}

}  // namespace

#define FP8FLOW_CALL(name, Args)                                                            \
    Plugin::Call Plugin::call(const op::Args& args) const {                                 \
        const auto run = runs_.find(#name);                                                 \
        return run == runs_.end() ? Call{} : prepared_call(run->second, #name, args, gpu_); \
    }
FP8FLOW_FOR_EACH_OP(FP8FLOW_CALL)
FP8FLOW_FOR_EACH_COMPOSED_OP(FP8FLOW_CALL)
#undef FP8FLOW_CALL

Plugin::Plugin(bool gpu) : gpu_(gpu) {
    for (const std::string& name : known_operations()) runs_.emplace(name, nullptr);
}

Plugin::Plugin(const std::string& path, bool gpu) : gpu_(gpu) {
    const std::string where = "--plugin " + printable(path);
    const auto exported = reinterpret_cast<decltype(&fp8flow_plugin)>(
        plugin_symbol(path, "fp8flow_plugin", "fp8flow/plugin.h",
                      "it is a C function, in C++ extern \"C\" (docs/usage/bench.md)"));
    const fp8flow_plugin_table* const table = exported();
    require(table != nullptr && table->version == FP8FLOW_PLUGIN_VERSION, ExitCode::usage,
            "{}: version {} of the table, this program has {}: build it with this version's plugin.h", where,
            table == nullptr ? 0 : table->version, FP8FLOW_PLUGIN_VERSION);
    require(table->name != nullptr && *table->name != 0 && table->num_operations > 0 &&
                table->operations != nullptr,
            ExitCode::usage, "{}: the table has no name or no operations", where);
    name_ = printable(table->name);
    const std::vector<std::string> known = known_operations();
    for (int32_t i = 0; i < table->num_operations; ++i) {
        const fp8flow_plugin_operation& one = table->operations[i];
        require(one.operation != nullptr && one.run != nullptr, ExitCode::usage,
                "{}: operation {} of the table has no name or no function", where, i);
        require(std::ranges::find(known, one.operation) != known.end(), ExitCode::usage,
                "{}: unknown operation '{}'; see fp8flow bench --list", where, printable(one.operation));
        require(runs_.emplace(one.operation, one.run).second, ExitCode::usage,
                "{}: operation {} is there twice", where, one.operation);
    }
}

bool Plugin::has(const std::string& operation) const { return runs_.contains(operation); }

std::vector<std::string> Plugin::operations() const {
    std::vector<std::string> names;
    for (const auto& [name, run] : runs_) names.push_back(name);
    return names;
}

std::string compare_results(Device& device, const std::vector<NamedTensor>& tensors,
                            const std::function<void()>& ours, const std::function<void()>& theirs) {
    using Bytes = std::vector<uint8_t>;
    const auto read = [&](const TensorView& view) {
        Bytes bytes(static_cast<size_t>(view.bytes()));
        device.copy_out(bytes.data(), view.data, bytes.size());
        return bytes;
    };
    std::vector<Bytes> before, results;
    const auto restore = [&] {
        for (size_t i = 0; i < tensors.size(); ++i)
            device.copy_in(tensors[i].view.data, before[i].data(), before[i].size());
        device.synchronize();
    };
    for (const NamedTensor& tensor : tensors) before.push_back(read(tensor.view));
    ours();
    device.synchronize();
    for (const NamedTensor& tensor : tensors) results.push_back(read(tensor.view));
    restore();
    theirs();
    device.synchronize();
    std::vector<std::string> differences;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const std::string found =
            difference(results[i].data(), read(tensors[i].view).data(), tensors[i].view);
        if (!found.empty()) differences.push_back(tensors[i].name + ": " + found);
    }
    restore();
    return differences.empty() ? "equal" : fmt::format("{}", fmt::join(differences, ", "));
}

}  // namespace fp8flow::bench
