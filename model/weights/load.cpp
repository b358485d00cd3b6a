// SPDX-License-Identifier: MIT
// The check of all names and shapes, then the copy, piece by piece in blocks of rows, so that no tensor
// is in memory twice.
#include "model/weights/load.h"

#include "kernels/core/scalar_math.h"
#include "model/config/fields.h"
#include "model/config/hf_config.h"
#include "model/job/watchdog.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace fp8flow::weights {

namespace {

bool is_floating(FileDType dtype) {
    using enum FileDType;
    return dtype == f32 || dtype == f64 || dtype == bf16 || dtype == f16 || dtype == e4m3;
}

std::string shape_text(const std::vector<int64_t>& shape) {
    return fmt::format("[{}]", fmt::join(shape, ", "));
}

// Tables of the rotary embedding, which older files hold; model.rotary_base gives ours, and theirs in
// Transformers.
bool is_rotary_table(const std::string& name) {
    return name.starts_with("rotary_emb.") || name.find(".rotary_emb.") != std::string::npos;
}

class Check {
public:
    explicit Check(const TensorSet& set) : set_(set) {}

    void want(const WeightPiece& piece) {
        if (!wanted_.insert(piece.tensor).second) return;
        const TensorSet::Item item = set_.find(piece.tensor);
        if (!item) return problem("tensor \"{}\" is missing, want {}", piece.tensor, shape_text(piece.shape));
        if (item.entry->shape != piece.shape)
            return problem("tensor \"{}\" is {}, want {}", piece.tensor, describe(*item.entry),
                           shape_text(piece.shape));
        if (!is_floating(item.entry->dtype))
            return problem("tensor \"{}\" is {}, want BF16, F16, F32, or F8_E4M3 with scales", piece.tensor,
                           describe(*item.entry));
        if (item.entry->dtype == FileDType::e4m3) want_scales(piece);
    }

    void find_extra(const std::vector<std::string>& scopes, const std::set<std::string>& others) {
        const auto inside = [&](const std::string& name) {
            return std::ranges::any_of(scopes, [&](const auto& scope) { return name.starts_with(scope); });
        };
        for (const std::string& name : set_.names())
            if (inside(name) && !wanted_.contains(name) && !others.contains(name) && !is_rotary_table(name))
                problem("tensor \"{}\" is extra: the configuration has no place for it", printable(name));
        for (const TensorSet::Item& item : set_.unindexed())
            if (!is_rotary_table(item.entry->name))
                problems_.push_back(fmt::format("{}: holds tensor \"{}\", which the index does not name",
                                                item.file->path(), printable(item.entry->name)));
    }

    void finish() const { throw_problems(problems_, ExitCode::data); }
    int64_t tensors() const { return static_cast<int64_t>(wanted_.size()); }
    int64_t dequantised() const { return dequantised_; }

private:
    void want_scales(const WeightPiece& piece) {
        const std::string name = scale_name(piece.tensor);
        wanted_.insert(name);
        if (piece.shape.size() < 2)
            return problem("tensor \"{}\" is F8_E4M3, want a matrix for that", piece.tensor);
        const std::vector<int64_t> shape = scale_shape(piece.shape);
        const TensorSet::Item item = set_.find(name);
        if (!item)
            return problem(
                "tensor \"{}\" is missing: \"{}\" is F8_E4M3 and means nothing without its scales {}", name,
                piece.tensor, shape_text(shape));
        const FileDType dtype = item.entry->dtype;
        if (item.entry->shape != shape ||
            (dtype != FileDType::f32 && dtype != FileDType::bf16 && dtype != FileDType::e8m0))
            return problem(
                "tensor \"{}\" is {}, want F32, BF16 or F8_E8M0 {}: one scale for each block of {} x {}",
                name, describe(*item.entry), shape_text(shape), kScaleBlock, kScaleBlock);
        ++dequantised_;
    }
    template <class... Args> void problem(fmt::format_string<Args...> format, Args&&... args) {
        problems_.push_back(set_.path() + ": " + fmt::format(format, std::forward<Args>(args)...));
    }

    const TensorSet& set_;
    std::set<std::string> wanted_;
    std::vector<std::string> problems_;
    int64_t dequantised_ = 0;
};

// Values of a piece as the parameter has them, a block of our rows at a time; a transposed one at once.
class PieceReader {
public:
    PieceReader(const TensorSet& set, const WeightPiece& piece)
        : piece_(piece), item_(set.find(piece.tensor)), bytes_(item_.bytes()) {
        if (item_.entry->dtype != FileDType::e4m3) return;
        const TensorSet::Item scales = set.find(scale_name(piece.tensor));
        scales_.resize(to_size(scales.entry->numel()));
        read_floats(*scales.entry, scales.bytes(), 0, scales_);
        matrix_rows_ = piece.shape[piece.shape.size() - 2];
    }

    void read(int64_t first, int64_t rows, std::span<float> out) const {
        if (piece_.transposed) {
            std::vector<float> theirs(out.size());
            read_file_rows(piece_.file_row, piece_.rows, theirs);
            for (int64_t r = 0; r < piece_.rows; ++r)
                for (int64_t c = 0; c < piece_.cols; ++c)
                    out[to_size(c * piece_.rows + r)] = theirs[to_size(r * piece_.cols + c)];
        } else if (piece_.order.empty()) {
            read_file_rows(piece_.file_row + first, rows, out);
        } else {
            for (int64_t r = 0; r < rows; ++r)
                read_file_rows(piece_.file_row_of(first + r), 1, out.subspan(to_size(r * piece_.cols)));
        }
        if (piece_.scale != 1)
            for (float& value : out) value = static_cast<float>(value * piece_.scale);
    }

private:
    void read_file_rows(int64_t first, int64_t rows, std::span<float> out) const {
        read_floats(*item_.entry, bytes_, first * piece_.cols, out.first(to_size(rows * piece_.cols)));
        if (scales_.empty()) return;
        const int64_t scale_cols = ceil_div(piece_.cols, kScaleBlock),
                      scale_rows = ceil_div(matrix_rows_, kScaleBlock);
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t row = first + r, matrix = row / matrix_rows_;
            const float* scales =
                scales_.data() + (matrix * scale_rows + row % matrix_rows_ / kScaleBlock) * scale_cols;
            float* values = out.data() + r * piece_.cols;
            for (int64_t c = 0; c < piece_.cols; ++c) values[c] *= scales[c / kScaleBlock];
        }
    }

    const WeightPiece& piece_;
    TensorSet::Item item_;
    std::span<const uint8_t> bytes_;
    std::vector<float> scales_;
    int64_t matrix_rows_ = 1;
};

}  // namespace

WeightTarget target_of(Parameter& parameter) {
    return {parameter.spec, parameter.master, &parameter, parameter.slice.first};
}

WeightTarget bias_target(int64_t layer, const TensorView& bias) {
    ParameterSpec spec;
    spec.name = fmt::format("layers.{}.moe.router.expert_bias", layer);
    spec.shape[0] = bias.dim(0);
    spec.rank = 1;
    return {spec, bias};
}

std::vector<WeightTarget> targets_of(Transformer& model) {
    std::vector<WeightTarget> targets;
    for (Parameter& parameter : model.parameters().all()) targets.push_back(target_of(parameter));
    for (size_t i = 0; i < model.blocks().size(); ++i) {
        const Router* router = model.blocks()[i]->router();
        if (router != nullptr && router->expert_bias())
            targets.push_back(bias_target(static_cast<int64_t>(i), router->expert_bias()));
    }
    return targets;
}

std::vector<WeightTarget> whole_targets_of(Transformer& model, Exchange& exchange, Arena& scratch) {
    std::vector<WeightTarget> targets = targets_of(model);
    for (WeightTarget& target : targets) {
        const Parameter* p = target.parameter;
        if (p == nullptr || !p->is_sharded()) continue;
        target.values = !p->frozen && p->main_grad.dtype == DType::f32
                            ? p->main_grad
                            : scratch.tensor(DType::f32, {p->numel()}, "export");
        target.first = 0;
        model.parameters().gather_master(exchange, *p, target.values);
    }
    return targets;
}

namespace {

// Copies `values`, which begin at `element` of the tensor, as far as this rank holds them.
void copy_elements(const WeightTarget& target, int64_t element, const std::vector<float>& values,
                   Device& device) {
    const int64_t begin = std::max(element, target.first),
                  end = std::min(element + static_cast<int64_t>(values.size()),
                                 target.first + target.values.numel());
    if (begin >= end) return;
    device.copy_in(target.values.as<float>() + (begin - target.first), values.data() + (begin - element),
                   to_size(end - begin) * sizeof(float));
}

// Copies rows of a piece from `first` on. Columns that the file does not have keep their zeros.
void copy_rows(const WeightTarget& target, const WeightPiece& piece, int64_t first, int64_t rows,
               const std::vector<float>& values, Device& device) {
    const int64_t ours = piece.our_cols();
    if (piece.wider == 0) return copy_elements(target, (piece.row + first) * ours, values, device);
    std::vector<float> wider(to_size(rows * ours));
    for (int64_t r = 0; r < rows; ++r)
        std::copy_n(values.begin() + r * piece.cols, piece.cols, wider.begin() + r * ours);
    copy_elements(target, (piece.row + first) * ours, wider, device);
}

// Where the two are tied, a head that differs from the embedding would be lost.
void require_same_values(const TensorSet& set, const WeightPiece& embedding, const WeightPiece& head) {
    const PieceReader readers[] = {{set, embedding}, {set, head}};
    std::vector<float> values[2];
    const int64_t at_once = std::max<int64_t>(1, kElementsAtOnce / embedding.cols);
    for (int64_t first = 0; first < embedding.rows; first += at_once) {
        note_progress();
        const int64_t rows = std::min(at_once, embedding.rows - first);
        for (int i = 0; i < 2; ++i) {
            values[i].resize(to_size(rows * embedding.cols));
            readers[i].read(first, rows, values[i]);
        }
        require(values[0] == values[1], ExitCode::data,
                "{}: tensor \"{}\" differs from \"{}\", and tied weights have one of them; set "
                "model.untie_embeddings_and_output_weights: true to use both, or remove the tensor",
                set.path(), head.tensor, embedding.tensor);
    }
}

}  // namespace

LoadedWeights load_weights(const TensorSet& set, const HfNames& names,
                           const std::vector<WeightTarget>& targets, const WeightShapes& shapes,
                           const std::vector<std::string>& scopes, ParameterStore& store, Device& device,
                           const std::set<std::string>& others) {
    Check check(set);
    std::vector<WeightPiece> tied;  // the embedding and the head, where the files have both
    for (const WeightTarget& target : targets)
        for (const WeightPiece& piece :
             pieces_of(of_all_experts(target.spec, shapes.moe), shapes.model, shapes.moe, names)) {
            check.want(piece);
            if (target.spec.name != "embedding.word_embeddings.weight" || !set.contains("lm_head.weight") ||
                shapes.model.untie_embeddings_and_output_weights)
                continue;
            tied = {piece, piece};
            tied[1].tensor = "lm_head.weight";
            check.want(tied[1]);
        }
    check.find_extra(scopes, others);
    check.finish();
    if (!tied.empty()) require_same_values(set, tied[0], tied[1]);

    std::vector<std::string> problems;
    std::vector<float> values;
    for (const WeightTarget& target : targets) {
        // what no file has: rows of padding
        device.fill(target.values.data, 0, to_size(target.values.bytes()));
        for (const WeightPiece& piece : pieces_of(target.spec, shapes.model, shapes.moe, names)) {
            const PieceReader reader(set, piece);
            const int64_t all = piece.our_rows(), cols = piece.transposed ? piece.rows : piece.cols,
                          at_once = piece.transposed ? all : std::max<int64_t>(1, kElementsAtOnce / cols);
            int64_t bad = 0;
            for (int64_t first = 0; first < all; first += at_once) {
                note_progress();
                const int64_t rows = std::min(at_once, all - first);
                values.resize(to_size(rows * cols));
                reader.read(first, rows, values);
                bad += std::count_if(values.begin(), values.end(),
                                     [](float x) { return !std::isfinite(round_bf16(x)); });
                copy_rows(target, piece, first, rows, values, device);
            }
            if (bad > 0)
                problems.push_back(
                    fmt::format("{}: tensor \"{}\": {} of its values are NaN, infinite or too large for BF16",
                                set.find(piece.tensor).file->path(), piece.tensor, bad));
        }
        if (target.parameter != nullptr && !target.parameter->is_sharded())
            store.write_copies(*target.parameter);
    }
    device.synchronize();
    throw_problems(problems, ExitCode::data);
    return {check.tensors(), check.dequantised()};
}

namespace {

// Lines on the differences between a config.json next to the weights and the configuration: a model with
// another RoPE or norm would load and be wrong.
std::vector<std::string> differences(const ImportedModel& imported, const Config& config) {
    std::vector<std::string> lines;
    ImportedModel of_any_length = imported;
    of_any_length.unscaled_length = 0;
    const Config theirs = parse_config(fmt::format("model: {{seq_length: {}}}", config.model.seq_length),
                                       "config.json", {}, std::nullopt, of_any_length);
    if (imported.unscaled_length > 0 && config.model.seq_length > imported.unscaled_length)
        lines.push_back(
            fmt::format("warning: {}: rope_type dynamic changes frequencies of more than {} tokens there, "
                        "model.rope_type is {} here",
                        imported.name, imported.unscaled_length, field_named("model.rope_type").get(config)));
    if (!config.imported.empty() && imported.folds != config.folds)
        lines.push_back(fmt::format("warning: {}: multipliers are those of {}, and others there",
                                    imported.name, config.imported));
    for (const ConfigSetting& setting : imported.settings) {
        const ConfigField& field = field_named(setting.key);
        const bool same = setting.key == "model.moe_layer_freq"
                              ? theirs.model.moe_layer_freq == config.model.moe_layer_freq
                              : field.get(theirs) == field.get(config);
        if (!same && changes_the_model(setting.key))
            lines.push_back(fmt::format("warning: {}: {} is {} there and {} here", setting.where, setting.key,
                                        field.get(theirs), field.get(config)));
    }
    return lines;
}

// Tensors of multi-token prediction, which is not implemented: layers past the last one of the model.
std::set<std::string> later_layers(const TensorSet& set, const HfNames& names, const ImportedModel& model) {
    int64_t layers = 0;
    for (const ConfigSetting& setting : model.settings)
        if (setting.key == "model.num_layers") layers = std::stoll(setting.value);
    std::set<std::string> later;
    if (layers == 0) return later;
    const std::string prefix = std::string(names.storage.root) + names.storage.layers;
    for (const std::string& name : set.names()) {
        int64_t layer = 0;
        const char* const end = name.data() + name.size();
        if (name.starts_with("mtp.") || name.starts_with("model.mtp.") ||
            (name.starts_with(prefix) &&
             std::from_chars(name.data() + prefix.size(), end, layer).ec == std::errc{} && layer >= layers))
            later.insert(name);
    }
    return later;
}

// Tensors of an indexer. In sequences that are short enough for it, an indexer chooses every key.
std::set<std::string> indexers(const TensorSet& set, const HfNames& names, const ImportedModel& model) {
    std::set<std::string> found;
    const HfFamily* const family = hf_family(model.family);
    if (family == nullptr || family->index_topk == 0) return found;
    for (const std::string& name : set.names())
        if (name.find(std::string(names.storage.attention) + "indexer.") != std::string::npos)
            found.insert(name);
    return found;
}

}  // namespace

HfNames names_of_model(const TensorSet& set, const Config& config, const std::string& family) {
    const auto& layers = config.model.moe_layer_freq;
    const auto first_moe = std::find(layers.begin(), layers.end(), 1) - layers.begin();
    require(first_moe < static_cast<int64_t>(layers.size()), ExitCode::usage,
            "model.moe_layer_freq: has no MoE layer, want one with --weights");
    HfNames names = find_names(set, first_moe, family);
    require(!names.only_block, ExitCode::data,
            "{}: holds one MoE block alone, a model is wanted; one block: fp8flow replay", set.path());
    names.first_layer = 0;
    const auto first_dense = std::find(layers.begin(), layers.end(), 0) - layers.begin();
    const TensorSet::Item gate = set.find(names.ffn(first_dense) + "gate_proj.weight");
    if (gate && !gate.entry->shape.empty() &&
        round_up(gate.entry->shape[0], kBlock) == config.model.ffn_hidden_size &&
        gate.entry->shape[0] < config.model.ffn_hidden_size)
        names.dense_width = gate.entry->shape[0];
    return names;
}

std::string folder_of_model(const std::string& path) {
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) return path;
    const std::string parent = std::filesystem::path(path).parent_path().string();
    return parent.empty() ? "." : parent;
}

std::vector<std::string> load_model(const std::string& path, const Config& config, Transformer& model,
                                    Device& device) {
    require(config.model.attention, ExitCode::usage,
            "--weights {}: a whole model is loaded with model.attention: true only; one MoE layer: fp8flow "
            "replay",
            path);
    require(!config.model.zero_centered_gamma, ExitCode::usage,
            "model.zero_centered_gamma: got true, want false with --weights: their norm weights are plain");
    std::error_code error;
    std::vector<std::string> lines;
    ImportedModel imported{.family = config.family, .folds = config.folds};
    if (const std::string json = folder_of_model(path) + "/config.json";
        std::filesystem::exists(json, error)) {
        imported = read_hf_config(json);
        lines = differences(imported, config);
    }
    const TensorSet set(existing("checkpoint.pretrained_checkpoint", path, ExitCode::data));
    HfNames names = names_of_model(set, config, imported.family);
    require(!imported.settings.empty() || !config.imported.empty() ||
                names.storage.experts != ExpertNames::linear,
            ExitCode::usage,
            "--weights {}: no config.json next to it, and these are tensors of Granite: put the model's "
            "there, or name it with --hf-config, for embedding_multiplier, attention_multiplier, "
            "residual_multiplier and logits_scaling",
            path);
    names.folds = config.imported.empty() ? imported.folds : config.folds;
    const std::set<std::string> later = later_layers(set, names, imported),
                                indexer = indexers(set, names, imported);
    std::set<std::string> ignored = later;
    ignored.insert(indexer.begin(), indexer.end());
    const LoadedWeights loaded = load_weights(set, names, targets_of(model), {config.model, config.moe}, {""},
                                              model.parameters(), device, ignored);
    if (!later.empty())
        lines.push_back(fmt::format(
            "weights: {} tensors past the last layer (multi-token prediction) are ignored, e.g. {}",
            later.size(), *later.begin()));
    if (!indexer.empty())
        lines.push_back(
            fmt::format("weights: {} tensors of the indexer are ignored, e.g. {}: it would choose "
                        "every key of {} tokens",
                        indexer.size(), *indexer.begin(), config.model.seq_length));
    if (!set.unread().empty())
        lines.push_back(fmt::format("warning: {}: not read, for they are no part of the model: {}", path,
                                    fmt::join(set.unread(), ", ")));
    lines.push_back(fmt::format(
        "weights: {} ({} tensors{})", path, loaded.tensors,
        loaded.dequantised > 0 ? fmt::format(", {} of them FP8, dequantised", loaded.dequantised) : ""));
    return lines;
}

}  // namespace fp8flow::weights
