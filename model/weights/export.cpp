// SPDX-License-Identifier: MIT
// Each rank streams its own file from the device, a block of rows at a time; names and sizes follow from the
// configuration, so nothing is exchanged for the index.
#include "model/weights/export.h"

#include "kernels/core/scalar_math.h"
#include "model/base/run_folder.h"
#include "model/job/watchdog.h"
#include "model/safetensors/input.h"
#include "model/safetensors/json.h"
#include "model/safetensors/writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

namespace fp8flow::weights {

namespace {

constexpr int64_t kMostCarriedBytes = int64_t{1} << 28;

// A tensor of the file: one piece, or several where experts are fused.
struct Stored {
    TensorDeclaration tensor;
    std::vector<WeightPiece> pieces;
    TensorView values;
};

// Matrices of whole blocks only: Transformers would read any other as one with another block size.
bool is_quantised(const ParameterSpec& spec, const WeightPiece& piece) {
    return spec.rank == 3 && piece.shape.end()[-1] % kScaleBlock == 0 &&
           piece.shape.end()[-2] % kScaleBlock == 0;
}

FileDType stored_type(const WeightTarget& target, const WeightPiece& piece, ExportFormat format,
                      const MoeSpec& moe) {
    const bool fp32_router =
        moe.moe_router_dtype == RouterDtype::fp32 && target.spec.name.ends_with(".router.weight");
    if (target.parameter == nullptr || format == ExportFormat::f32 || fp32_router)
        return FileDType::f32;  // the expert bias too
    return format == ExportFormat::fp8 && is_quantised(target.spec, piece) ? FileDType::e4m3
                                                                           : FileDType::bf16;
}

class Exporter {
public:
    Exporter(const std::vector<WeightTarget>& targets, const WeightShapes& shapes, const ExportChoice& choice,
             Device& device)
        : targets_(targets), shapes_(shapes), choice_(choice), device_(device) {}

    // What `rank` of `ranks` writes: its experts, and rank 0 the rest.
    std::vector<Stored> stored_by(int rank) const {
        std::vector<Stored> all;
        for (const WeightTarget& target : targets_) {
            ParameterSpec spec = target.spec;
            if (spec.expert) spec.first_expert = spec.shape[0] * rank;
            if (!spec.expert && rank != 0) continue;
            for (const WeightPiece& piece : pieces_of(spec, shapes_.model, shapes_.moe, choice_.names)) {
                if (all.empty() || all.back().tensor.name != piece.tensor)
                    all.push_back(
                        {{piece.tensor, stored_type(target, piece, choice_.format, shapes_.moe), piece.shape},
                         {},
                         target.values});
                all.back().pieces.push_back(piece);
            }
        }
        return all;
    }

    std::vector<TensorDeclaration> declarations(const std::vector<Stored>& stored) const {
        std::vector<TensorDeclaration> tensors;
        for (const Stored& one : stored) {
            tensors.push_back(one.tensor);
            if (one.tensor.dtype != FileDType::e4m3) continue;
            tensors.push_back({scale_name(one.tensor.name), FileDType::f32, scale_shape(one.tensor.shape)});
        }
        return tensors;
    }

    void write(const std::vector<Stored>& stored, SafetensorsWriter& writer) {
        for (const Stored& one : stored) {
            scales_.clear();
            for (const WeightPiece& piece : one.pieces) write_piece(one, piece, writer);
            if (!scales_.empty())
                writer.append(scale_name(one.tensor.name), scales_.data(),
                              static_cast<int64_t>(scales_.size() * sizeof(float)));
        }
        writer.finish();
    }

private:
    void write_piece(const Stored& one, const WeightPiece& piece, SafetensorsWriter& writer) {
        // whole scale blocks; the rows of an expert begin a block of their own
        const int64_t at_once =
            std::max<int64_t>(1, kElementsAtOnce / piece.cols / kScaleBlock) * kScaleBlock;
        if (piece.zero_rows > 0) {
            std::vector<float> rest(to_size(piece.zero_rows * piece.cols));
            device_.copy_out(rest.data(), one.values.as<float>() + (piece.row + piece.rows) * piece.cols,
                             rest.size() * sizeof(float));
            require_zeros(piece, count_nonzero(rest));
        }
        const std::vector<float> moved = piece.plain() ? std::vector<float>{} : as_stored(one, piece);
        for (int64_t first = 0; first < piece.rows; first += at_once) {
            const int64_t rows = std::min(at_once, piece.rows - first);
            values_.resize(to_size(rows * piece.cols));
            if (piece.plain())
                device_.copy_out(values_.data(), one.values.as<float>() + (piece.row + first) * piece.cols,
                                 values_.size() * sizeof(float));
            else
                std::copy_n(moved.begin() + first * piece.cols, values_.size(), values_.begin());
            encode(one.tensor.dtype, rows, piece.cols);
            note_progress();
            writer.append(one.tensor.name, encoded_.data(), static_cast<int64_t>(encoded_.size()));
        }
    }

    static int64_t count_nonzero(std::span<const float> values) {
        return std::count_if(values.begin(), values.end(), [](float value) { return value != 0; });
    }
    // `lost`: values that the parameter has and the file has no place for.
    void require_zeros(const WeightPiece& piece, int64_t lost) const {
        require(
            lost == 0, ExitCode::usage,
            "export: tensor \"{}\" is [{}] in the model of checkpoint.pretrained_checkpoint, and {} values "
            "past that are not zero; leave the key out to export model.ffn_hidden_size = {} as it is",
            piece.tensor, fmt::join(piece.shape, ", "), lost, shapes_.model.ffn_hidden_size);
    }

    // A whole piece, if its rows or columns differ from those in the file.
    std::vector<float> as_stored(const Stored& one, const WeightPiece& piece) const {
        const int64_t ours = piece.our_cols();
        std::vector<float> from(to_size(piece.our_rows() * ours)), to(to_size(piece.rows * piece.cols));
        device_.copy_out(from.data(), one.values.as<float>() + piece.row * ours, from.size() * sizeof(float));
        if (piece.wider > 0) {
            int64_t lost = 0;
            for (int64_t r = 0; r < piece.rows; ++r)
                lost += count_nonzero(
                    std::span(from).subspan(to_size(r * ours + piece.cols), to_size(ours - piece.cols)));
            require_zeros(piece, lost);
        }
        for (int64_t r = 0; r < piece.our_rows(); ++r)
            for (int64_t c = 0; c < std::min(ours, piece.transposed ? ours : piece.cols); ++c) {
                const int64_t at = piece.transposed
                                       ? c * piece.cols + r
                                       : (piece.file_row_of(r) - piece.file_row) * piece.cols + c;
                to[to_size(at)] = static_cast<float>(from[to_size(r * ours + c)] * piece.scale);
            }
        return to;
    }

    void encode(FileDType dtype, int64_t rows, int64_t cols) {
        encoded_.resize(values_.size() * to_size(size_of(dtype)));
        if (dtype == FileDType::f32) {
            std::memcpy(encoded_.data(), values_.data(), encoded_.size());
        } else if (dtype == FileDType::bf16) {
            for (size_t i = 0; i < values_.size(); ++i) {
                const Bf16 value = to_bf16(values_[i]);
                std::memcpy(encoded_.data() + 2 * i, &value, 2);
            }
        } else {
            quantise(rows, cols);
        }
    }

    void quantise(int64_t rows, int64_t cols) {
        for (int64_t r0 = 0; r0 < rows; r0 += kScaleBlock)
            for (int64_t c0 = 0; c0 < cols; c0 += kScaleBlock) {
                const auto each = [&](auto&& visit) {
                    for (int64_t r = r0; r < std::min(rows, r0 + kScaleBlock); ++r)
                        for (int64_t c = c0; c < std::min(cols, c0 + kScaleBlock); ++c)
                            visit(to_size(r * cols + c));
                };
                float amax = 0;
                each([&](size_t i) { amax = max_ignore_nan(amax, abs_float(values_[i])); });
                const QuantScale scale = quant_scale(amax, kE4m3Max, ScaleFormat::pow2);
                each([&](size_t i) { encoded_[i] = to_e4m3(values_[i] * scale.multiplier).bits; });
                scales_.push_back(scale.dequant);
            }
    }

    const std::vector<WeightTarget>& targets_;
    const WeightShapes& shapes_;
    const ExportChoice& choice_;
    Device& device_;
    std::vector<float> values_, scales_;
    std::vector<uint8_t> encoded_;
};

// The first of these folders that has the file.
std::optional<std::string> found_in(const std::vector<std::string>& folders, const std::string& name) {
    std::error_code error;
    for (const std::string& folder : folders)
        if (const std::string path = folder + "/" + name; std::filesystem::is_regular_file(path, error))
            return path;
    return std::nullopt;
}

// Copies the keys that do not describe layers: special tokens, and how the router is trained.
std::string with_carried(const std::string& config_json, const ExportChoice& choice) {
    const auto path = found_in(choice.sources, "config.json");
    auto json = nlohmann::ordered_json::parse(config_json);
    if (!path) return json.dump(2) + "\n";
    const auto theirs = parse_json(read_text_file(*path, ExitCode::usage), *path, ExitCode::usage);
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id", "router_aux_loss_coef",
                            "output_router_logits", "aux_loss_alpha", "seq_aux"})
        if (theirs.is_object() && theirs.contains(key)) json[key] = theirs[key];
    return json.dump(2) + "\n";
}

std::string file_name(int rank, int ranks) {
    return fmt::format("model-{:05}-of-{:05}.safetensors", rank + 1, ranks);
}

}  // namespace

std::vector<std::string> export_weights(const OutputFolder& folder, const std::vector<WeightTarget>& targets,
                                        const WeightShapes& shapes, const ExportChoice& choice,
                                        ProcessGroup& group, Device& device) {
    const int rank = group.rank(), ranks = group.size();
    FP8FLOW_CHECK(ranks == 1 || !choice.names.joins_experts(), "joined experts from {} ranks", ranks);
    std::map<std::string, std::string> carried;  // now, since the folder may be its own source
    for (const char* name : kCarriedFiles)
        if (const auto path = found_in(choice.sources, name); path && rank == 0)
            carried[name] = read_text_file(*path, ExitCode::output, "", kMostCarriedBytes);
    if (rank == 0) folder.remove_leftovers();
    group.barrier();
    Exporter exporter(targets, shapes, choice, device);
    AtomicFile file = folder.create_atomic(file_name(rank, ranks));
    const std::vector<Stored> stored = exporter.stored_by(rank);
    SafetensorsWriter writer(exporter.declarations(stored), {{"format", "pt"}},
                             [&](const void* data, size_t bytes) { file.write(data, bytes); });
    exporter.write(stored, writer);
    group.barrier();
    // What an earlier export left goes when everything is written and before anything has its name.
    if (rank == 0) remove_exported(folder);
    group.barrier();
    file.commit();
    group.barrier();
    std::vector<std::string> names;
    if (rank != 0) return names;
    for (const auto& [name, text] : carried) {
        folder.write_atomic(name, text);
        names.push_back(name);
    }
    if (!choice.config_json.empty()) folder.write_atomic("config.json", choice.config_json);
    nlohmann::ordered_json map = nlohmann::ordered_json::object();
    int64_t total = 0;
    for (int r = 0; r < ranks; ++r)
        for (const TensorDeclaration& tensor : exporter.declarations(exporter.stored_by(r))) {
            map[tensor.name] = file_name(r, ranks);
            total += checked_bytes(tensor.dtype, tensor.shape).value();
        }
    const nlohmann::ordered_json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
    folder.write_atomic("model.safetensors.index.json", index.dump(2) + "\n");
    return names;
}

HfNames export_names(const Config& config) {
    HfNames names;
    if (!config.model.attention) return names;
    names.storage = export_family(config).storage;
    if (names.storage.experts == ExpertNames::linear) names.shared = ExpertNames::linear;
    return names;
}

std::optional<ExportChoice> export_plan(const Config& config, const std::string& hf_config) {
    if (config.output.export_format == ExportFormat::none) return std::nullopt;
    ExportChoice choice{.names = export_names(config), .format = config.output.export_format};
    for (const std::string& model : {config.checkpoint.pretrained_checkpoint, hf_config})
        if (!model.empty()) choice.sources.push_back(folder_of_model(model));
    std::error_code error;
    if (const std::string& from = config.checkpoint.pretrained_checkpoint;
        config.model.attention && std::filesystem::exists(from, error))
        choice.names.dense_width = names_of_model(TensorSet(from), config, config.family).dense_width;
    require(
        !choice.names.joins_experts() || config.parallel.expert_model_parallel_size == 1, ExitCode::usage,
        "parallel.expert_model_parallel_size: got {}, want 1 with --export: this family has the experts of a "
        "layer in one tensor",
        config.parallel.expert_model_parallel_size);
    require(choice.format != ExportFormat::fp8 || choice.names.storage.experts != ExpertNames::linear,
            ExitCode::usage,
            "output.export_format: got fp8, want bf16 or f32: Transformers reads no FP8 experts of this "
            "family (Granite)");
    if (config.model.attention)
        choice.config_json =
            with_carried(hf_config_of(config, choice.format, choice.names.dense_width), choice);
    return choice;
}

}  // namespace fp8flow::weights
