// SPDX-License-Identifier: MIT
// The resolved configuration of a run, and the functions that read, check, print and compare it. Leaf keys
// are Megatron's names and equal the struct members, so one search leads from a YAML file to the code that
// uses a value. One field table (model/config/fields.cpp) drives parsing, errors, `--help-config`, the dump
// and the diff.
#pragma once

#include "kernels/backends/dispatcher.h"
#include "layers/spec.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow {

constexpr double f64(auto number) { return static_cast<double>(number); }
constexpr size_t to_size(auto number) { return static_cast<size_t>(number); }

constexpr int64_t kByteVocabulary = 257;  // tokens of byte-level text: byte values, end of document

enum class LrDecayStyle : uint8_t { constant, cosine, linear, wsd };
enum class WsdDecayStyle : uint8_t { exponential, linear, cosine, minus_sqrt };
enum class LrWarmupStyle : uint8_t { from_zero, from_first_step };
enum class OnDivergence : uint8_t { stop, skip, rollback };
enum class OnError : uint8_t { stop, warn };
// Of weights with Hugging Face names. fp8: matrices of experts, shared experts and dense FFNs as E4M3 with a
// scale for each 128 x 128 block, the rest in BF16.
enum class ExportFormat : uint8_t { none, bf16, f32, fp8 };
// text: bytes of the user's files; synthetic: seeded Markov chain; shards: llm.c `.bin` token files;
// megatron: its `.bin` with `.idx`.
enum class DataKind : uint8_t { text, synthetic, shards, megatron };

// Of messages between GPUs: what the routing makes them, which the host reads first; or a fixed size, with
// which the host waits for nothing.
enum class MessageSizesKey : uint8_t { routed, fixed };

// The world size comes from mpirun; data parallel size = world size; groups of EP ranks share the experts.
struct ParallelSpec {
    int64_t expert_model_parallel_size = 1;
    TokenDispatcher moe_token_dispatcher_type = TokenDispatcher::flex;
    FlexBackend moe_flex_dispatcher_backend = FlexBackend::nvlink;
    MessageSizesKey moe_message_sizes = MessageSizesKey::routed;
    // As if the job ran on so many hosts, with consecutive ranks on each; 0: on those that the launcher
    // names.
    int64_t hosts = 0, ranks_per_host = 0;
    double peer_deadline_seconds = 60;  // longest wait for another rank; then the job ends with a report
};

struct TrainingSpec {
    int64_t micro_batch_size = 1;   // sequences per rank and forward pass
    int64_t global_batch_size = 8;  // sequences per step over all ranks
    int64_t train_iters = 100;
    uint64_t seed = 1234;
    double lr = 1e-3;
    double min_lr = 1e-4;
    LrDecayStyle lr_decay_style = LrDecayStyle::cosine;
    int64_t lr_warmup_iters = 0;
    double lr_warmup_init = 0.0;  // where warm-up begins
    LrWarmupStyle lr_warmup_style = LrWarmupStyle::from_zero;
    int64_t lr_decay_iters = 0;      // 0: train_iters
    int64_t lr_wsd_decay_iters = 0;  // 0: a fifth of them
    WsdDecayStyle lr_wsd_decay_style = WsdDecayStyle::exponential;
    double weight_decay = 0.1;
    double adam_beta1 = 0.9;
    double adam_beta2 = 0.95;
    double adam_eps = 1e-8;
    double clip_grad = 1.0;  // global gradient norm; 0: no clipping
    StateDtypes state;
    Freeze freeze;
    bool use_distributed_optimizer = false;  // masters and moments divided over the ranks that replicate them
    // A step past one of these, or with a NaN, is not applied (model/train/divergence.h).
    double loss_spike_factor = 0.0;  // times the median of recent losses; 0: no limit
    double grad_norm_limit = 0.0;    // before clipping; 0: no limit
    OnDivergence on_divergence = OnDivergence::stop;
    int64_t eval_interval = 0;  // steps between held-out evaluations; 0: only after the last step
    int64_t eval_iters = 10;    // global batches of one evaluation; 0: no evaluation
};

struct DataSpec {
    DataKind data_kind = DataKind::synthetic;
    std::vector<std::string> data_path;        // text, shards, megatron: files, folders, globs
    std::string routing_path;                  // experts of every token; empty: the routers choose
    std::vector<std::string> file_extensions;  // text, in folders; "": names without; []: all
    double held_out_fraction = 0.1;            // text: of the files; megatron: of the documents
    int64_t max_bytes = 268435456;             // text: stop reading after this many bytes
    int64_t synthetic_vocab_size = 64;         // V, states of the chain
    int64_t synthetic_order = 2;               // k; V^(k+1) is at most 2^22
    double synthetic_zipf_exponent = 1.0;      // of the unigram distribution
    int64_t synthetic_successors = 4;          // favoured next tokens of a context
    double synthetic_noise = 0.2;              // share of draws that ignore the context
    uint64_t synthetic_seed = 1;               // of the chain itself
};

struct OutputSpec {
    std::string out = "runs/out";  // every file of a run goes below this folder; `--out` overrides
    int64_t log_interval = 1;
    bool metrics = true;                   // write metrics.jsonl
    std::string tensorboard_dir;           // event files in this folder below `out`; empty: none
    int64_t tensorboard_log_interval = 1;  // steps between scalars
    bool moe_per_layer_logging = false;    // TensorBoard: the router's losses of each layer
    std::string record_routing;            // experts of every token to this file; empty: none
    bool time_stages = false;              // seconds per stage of every step, in metrics.jsonl
    bool tensor_stats = false;             // per-tensor underflow, saturation and error against BF16
    int64_t tensor_stats_interval = 100;
    ExportFormat export_format = ExportFormat::none;  // weights in the end, to `hf` below `out`
};

struct CheckpointSpec {
    std::string save;           // folder of this run's checkpoints; empty: checkpoints below output.out
    int64_t save_interval = 0;  // steps between checkpoints, and one after the last step; 0: none
    std::string pretrained_checkpoint;  // weights with Hugging Face names to begin with; empty: initial ones
    std::string load;  // resume from: `auto`, a folder of checkpoints, or one of them; empty: start afresh
    int64_t most_recent_k = 2;         // checkpoints that are kept; 0: all
    bool async_save = true;            // write in the background
    bool finetune = false;             // load weights only and start at step 0
    OnError on_error = OnError::stop;  // where one cannot be written
};

std::vector<Recipe> default_validate_recipes();  // bf16, fp8_blockwise, fp8_flow

// The run that gives the noise floor. ulp: bf16 from initial weights one unit in the last place away;
// exact: bf16 with another order of summation, which costs up to twice the time.
enum class ControlArm : uint8_t { none, ulp, exact };

struct ValidateSpec {
    std::vector<Recipe> recipes = default_validate_recipes();
    double max_relative_loss_error = 0.0025;  // the paper's acceptance threshold
    double ema_decay = 0.95;                  // smoothing of the loss curves that are compared
    int64_t warmup_iters = 20;                // steps left out of the verdict
    ControlArm control_arm = ControlArm::ulp;
};

// auto: the fastest that runs. The reference backend knows one.
enum class AttentionBackendKey : uint8_t { automatic, native, cudnn };

struct KernelSpec {
    AttentionBackendKey attention_backend = AttentionBackendKey::automatic;
};

// balanced and skewed: the router is ignored (model/train/forced_routing.h); data: as it chooses.
enum class ProfileRouting : uint8_t { balanced, skewed_1_25, skewed_2_0, data };

struct ProfileSpec {
    int64_t profile_step_start = 5;  // steps before it warm up
    int64_t profile_step_end = 15;   // exclusive
    std::vector<Recipe> profile_recipes = default_validate_recipes();
    ProfileRouting routing = ProfileRouting::balanced;
    double energy_seconds = 5;  // window of the energy counter; 0: not measured
};

// Constants of an imported model that are multiplied into its weights when they are read: our weight = factor
// x its weight. mlp_output is inside a MoE block, the others are outside.
struct WeightFolds {
    double embedding = 1, final_norm = 1, query = 1, residual = 1, mlp_output = 1;
    bool operator==(const WeightFolds&) const = default;
};

struct Config {
    ModelSpec model;
    MoeSpec moe;
    PrecisionSpec precision;
    RecomputeSpec recompute;
    ScheduleSpec schedule;
    ParallelSpec parallel;
    TrainingSpec training;
    DataSpec data;
    OutputSpec output;
    ValidateSpec validate;
    ProfileSpec profile;
    KernelSpec kernels;
    CheckpointSpec checkpoint;

    std::string moe_layer_freq = "1";  // as written; resolve_config expands it into model.moe_layer_freq
    std::map<std::string, std::string> origin;  // "section.key" -> "file:line:col" of each key that was set
    std::string foreign;          // ImportedModel::foreign with its name, unless model.attention is set
    std::string imported;         // ImportedModel::name; empty: the settings are all there is
    std::string family;           // ImportedModel::family
    WeightFolds folds;            // ImportedModel::folds
    int64_t unscaled_length = 0;  // ImportedModel::unscaled_length, unless the user sets model.rope_type
    // Printed at the start: what an imported model sets and this program does not read, and what
    // resolve_config changed.
    std::vector<std::string> warnings;
};

// A key with its value as YAML and where it comes from, for messages.
struct ConfigSetting {
    std::string key;  // section.key
    std::string value;
    std::string where;
};

// A model that another program has described (hf_config.h): settings that come before all others.
struct ImportedModel {
    struct Note {
        std::string key, text;  // of interest unless the user sets the key
    };
    std::vector<ConfigSetting> settings;
    std::string name;    // "config.json: model_type olmoe"
    std::string family;  // "olmoe" (hf_families.h)
    WeightFolds folds;
    int64_t unscaled_length = 0;  // longer sequences rotate otherwise (dynamic); 0: none do
    std::string foreign;          // what of its layers is not implemented, which is left out; empty: nothing
    std::vector<Note> notes;      // become warnings
};

// Reads a YAML file and `section.key=value` (or `key=value`) overrides, resolves derived values and checks
// everything. Every problem found is one line of one Error (ExitCode::usage): `file:line:col: section.key:
// got X, want Y`. Without world_size the checks that need the number of ranks are left out. hf_config: a
// Hugging Face config.json that is read first; the YAML file and then the overrides change what it sets.
// Where there is one, `path` may be empty.
Config load_config(const std::string& path, const std::vector<std::string>& overrides = {},
                   std::optional<int64_t> world_size = std::nullopt, const std::string& hf_config = {});
// The same for text in memory; `name` replaces the file's name in messages.
Config parse_config(std::string_view text, const std::string& name,
                    const std::vector<std::string>& overrides = {},
                    std::optional<int64_t> world_size = std::nullopt, const ImportedModel& first = {});

// Fills what follows from other fields: model.moe_layer_freq and model.padded_vocab_size, precision.flow
// where one is registered, and the precision.recipe that it goes with; shortens a warm-up that is longer than
// the run.
void resolve_config(Config& config);
// Throws one Error with a line for every rule between fields that the (resolved) configuration breaks.
void check_config(const Config& config, std::optional<int64_t> world_size = std::nullopt);

// The same run under a recipe, without a flow of its own: precision options that the recipe does not know
// return to their defaults.
Config with_recipe(const Config& config, Recipe recipe);

std::string dump_config(
    const Config& config);  // YAML with every key; parse_config reads it back to an equal Config
std::string help_config();  // every key with type, range, default and meaning
// Whether the same weights compute something else with another value of this key.
bool changes_the_model(std::string_view name);
// One line "section.key: a | b" per key with different values.
std::vector<std::string> diff_configs(const Config& a, const Config& b);

std::string_view recipe_name(Recipe recipe);
// The name of its flow where it has one. The text is the argument's.
std::string_view recipe_name(const PrecisionSpec& precision);

}  // namespace fp8flow
