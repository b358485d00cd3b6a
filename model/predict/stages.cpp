// SPDX-License-Identifier: MIT
// Counts of one layer: the MoE layer stage by stage, the dense FFN, attention.
#include "model/predict/stages.h"

#include "kernels/core/scaled_tensor.h"
#include "layers/flows/fp8_flow.h"
#include "layers/parameter.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace fp8flow::predict {

namespace {

// Tiles of the grouped kernels and of FP8 GEMMs (kernels/hopper/gemm/sm90/pipeline.h): one per SM at a time,
// no split-K. cuBLASLt's GEMMs choose their own. An H20 has 78 SMs.
constexpr double kTileRows = 128, kTileCols = 256, kSms = 132;
// Cycles at the end of a tile that no MMA hides. Storing its 64 KiB takes 2,900
// (docs/kernels/grouped_gemm.md). With 1,700 of them, fc1, fc2 and their input gradients have the same share
// in the H200's calibration, though their tiles take 16 to 56 steps.
constexpr double kTileEnd = 1700;
constexpr double kFp8PerCycle = 8192;  // FLOPs of an SM; BF16: half

// What the SMs could have computed beyond `flops`, during `groups` GEMMs of [rows, cols] over `contraction`:
// SMs without a tile in the last wave, parts of tiles past an edge, and the ends of tiles.
double idle_flops(double groups, double rows, double cols, double contraction, double flops,
                  double end_of_tile) {
    const double tiles = groups * std::ceil(rows / kTileRows) * std::ceil(cols / kTileCols);
    return std::ceil(tiles / kSms) * kSms * (2 * kTileRows * kTileCols * contraction + end_of_tile) - flops;
}

// Sizes of one layer under one recipe. Bytes are of one element, scales included.
struct Sizes {
    const Config& config;
    const PrecisionSpec& precision;
    double first;  // of a step's micro-batches, the share that writes gradients and reads none

    double tokens = f64(config.training.micro_batch_size * config.model.seq_length);
    double hidden = f64(config.model.hidden_size), ffn = f64(config.moe.moe_ffn_hidden_size);
    double experts = f64(config.moe.num_experts), topk = f64(config.moe.moe_router_topk);
    double ranks = f64(config.parallel.expert_model_parallel_size), local = experts / ranks;
    double rows = tokens * topk, received = plan::expected_received_rows(config);
    double shared = f64(config.moe.moe_shared_expert_intermediate_size);
    bool gated = config.moe.moe_shared_expert_gate;
    bool fp8 = precision.recipe != Recipe::bf16, flow = precision.recipe == Recipe::fp8_flow;
    bool full = config.recompute.recompute_granularity == RecomputeGranularity::full;
    bool merges = precision.moe_apply_probs_in == ProbsIn::combine;
    // of routed experts only: bytes of an element of a gradient, and its GEMMs per micro-batch: one, or one
    // for several
    double gradient = config.training.state.main_grads_dtype == StateDtype::bf16 ? 2 : 4;
    double joined = f64(std::max<int64_t>(precision.moe_wgrad_micro_batches, 1));
    double wgrads = fp8 ? std::ceil(1 / first / joined - 1e-9) * first : 1;
    double vector = 1 + kWord / f64(kBlock), tile = 1 + kWord / f64(kBlock * kBlock);
    double operand = fp8 ? vector : kPlain, weight = fp8 ? tile : kPlain, column = flow ? tile : operand;
    double wire = flow ? 1 + (precision.scale_format == ScaleFormat::pow2 ? 1 : kWord) / f64(kBlock) : kPlain;
};

class Stages {
public:
    Stages(const char* part, const Sizes& sizes) : part_(part), s_(sizes) {}

    Work& add(const char* stage, const char* direction, double launches, double bytes) {
        const auto same = [&](const Work& w) { return w.stage == stage && w.direction == direction; };
        auto found = std::ranges::find_if(work_, same);
        if (found == work_.end()) {
            work_.push_back({.part = part_, .stage = stage, .direction = direction});
            found = work_.end() - 1;
        }
        found->launches += launches;
        found->bytes += bytes;
        return *found;
    }
    void gemm(const char* stage, const char* direction, double bytes, double flops, bool fp8, double idle = 0,
              double launches = 1) {
        Work& work = add(stage, direction, launches, bytes);
        (fp8 ? work.fp8_flops : work.bf16_flops) += flops;
        (fp8 ? work.fp8_idle : work.bf16_idle) += idle;
    }

    void norm_forward(bool wire_rows, const char* direction = "forward") {
        const double row = s_.hidden * (2 * kPlain + (wire_rows ? s_.wire : 0)) + kWord;
        add("norm", direction, 1, s_.tokens * row + kWord * s_.hidden);
    }
    void norm_backward() {
        const double row = 4 * kPlain * s_.hidden + kWord;
        add("norm", "backward", 2, s_.tokens * row + 3 * kWord * s_.hidden);
    }

    const Sizes& sizes() const { return s_; }
    std::vector<Work> take() { return std::move(work_); }

private:
    const char* part_;
    const Sizes& s_;
    std::vector<Work> work_;
};

constexpr const char* kOwnFfn = "shared expert";  // and a dense layer's FFN: the same GEMMs

// The GEMMs and passes of experts over `rows` rows, with `experts` weights of `width`. Routed experts have
// one stage per GEMM. The FFN of a rank's own rows has one stage for all but its casts.
class Experts {
public:
    Experts(Stages& stages, double rows, double experts, double width, const char* weights)
        : out_(stages), rows_(rows), experts_(experts), width_(width), weights_(weights) {}

    void forward(const char* direction = "forward", bool with_fc2 = true) {
        const double h = s_.hidden, f = width_;
        if (s_.fp8 && !s_.flow) cast(h, direction);
        gemm("fc1", direction, rows_ * (h * s_.operand + 2 * f * kPlain) + experts_ * 2 * f * h * s_.weight,
             2 * f, h);
        out_.add(name("swiglu"), direction, 1,
                 rows_ * (2 * f * kPlain + prob(kWord) + f * (s_.flow ? s_.operand : kPlain)));
        if (s_.fp8 && !s_.flow) cast(f, direction);
        if (with_fc2)
            gemm("fc2", direction, rows_ * (f * s_.operand + h * kPlain) + experts_ * h * f * s_.weight, h,
                 f);
    }

    void backward() {
        const double h = s_.hidden, f = width_;
        const bool casts = s_.fp8 && !s_.flow;
        if (casts) cast(h, "backward");
        wgrad("fc2", h, f);
        gemm("fc2 dgrad", "backward", rows_ * (h * s_.operand + f * kPlain) + experts_ * h * f * s_.weight, f,
             h);
        const double dh = 2 * f * (s_.flow ? s_.operand : kPlain);
        out_.add(name("swiglu"), "backward", 1, rows_ * (3 * f * kPlain + dh + prob(2 * kWord)));
        if (casts) cast(2 * f, "backward");
        wgrad("fc1", 2 * f, h);
        gemm("fc1 dgrad", "backward",
             rows_ * (2 * f * s_.operand + h * kPlain) + experts_ * 2 * f * h * s_.weight, h, 2 * f);
    }

private:
    const char* name(const char* stage) const { return routed_ ? stage : kOwnFfn; }
    double prob(double bytes) const { return routed_ ? bytes : 0; }
    // [rows, n] of a contraction over k, group by group
    void gemm(const char* stage, const char* direction, double bytes, double n, double k) {
        const double flops = 2 * rows_ * n * k;
        out_.gemm(name(stage), direction, bytes, flops, s_.fp8,
                  tiled() ? idle_flops(experts_, rows_ / experts_, n, k, flops,
                                       kTileEnd * kFp8PerCycle / (s_.fp8 ? 1 : 2))
                          : 0);
    }
    bool tiled() const { return s_.fp8 || routed_; }  // not BF16 over a rank's own rows
    void wgrad(const std::string& layer, double n, double k) {
        const double trained = trained_share(s_.config, weights_ + ".linear_" + layer);
        if (s_.flow)
            for (const double width : {n, k})
                out_.add(name("transpose"), "backward", trained,
                         trained * rows_ * width * (s_.operand + s_.column));
        const double element = routed_ ? s_.gradient : kWord, gemms = routed_ ? s_.wgrads : 1;
        const double flops = 2 * rows_ * n * k, passes = 2 * gemms - s_.first;  // over the gradient
        const double idle =
            tiled() ? gemms * idle_flops(experts_, n, k, rows_ / gemms / experts_, flops / gemms, 0) : 0;
        out_.gemm(name((layer + " wgrad").c_str()), "backward",
                  trained * (rows_ * (n + k) * s_.column + experts_ * n * k * element * passes),
                  trained * flops, s_.fp8, trained * idle, trained * gemms);
    }
    void cast(double width, const char* direction) {
        out_.add("cast", direction, 1, rows_ * width * (kPlain + 2 * s_.operand));
    }

    Stages& out_;
    const Sizes& s_ = out_.sizes();
    double rows_, experts_, width_;
    std::string weights_;
    bool routed_ = weights_ == "moe.experts";
};

// Bytes that this rank sends, by plan's legs.
struct Legs {
    double routing = 0, dispatch = 0, combine_forward = 0, combine_backward = 0;
};
Legs legs_of(const Config& config, const PrecisionSpec& precision) {
    Config own = config;
    own.precision = precision;
    own.parallel.hosts = own.parallel.ranks_per_host = 0;  // time.cpp divides rows by its own topology
    const std::vector<plan::WireItem> items = plan::wire_bytes(own);
    return {items[0].forward, items[1].forward, items[2].forward, items[2].backward + items[3].backward};
}

void exchange(Stages& out, const char* stage, const char* direction, double bytes, Wire wire, double sent) {
    Work& work = out.add(stage, direction, 1, bytes);
    work.wire = wire;
    work.wire_bytes += sent;
}

// Each row once to every rank that needs it, and from there to its places.
void dispatch(Stages& out, const char* direction, const Legs& legs) {
    const Sizes& s = out.sizes();
    const double placed = s.flow ? s.operand : kPlain;
    exchange(out, "dispatch", direction, s.hidden * (s.tokens * s.wire + s.rows * placed), Wire::dispatch,
             legs.dispatch);
}

void own_ffn_forward(Stages& out, const char* weights, double width, const char* direction) {
    const Sizes& s = out.sizes();
    if (s.flow) out.add(kOwnFfn, direction, 1, s.tokens * s.hidden / f64(kBlock) * (1 + kWord));
    Experts(out, s.tokens, 1, width, weights).forward(direction);
}
void own_ffn_backward(Stages& out, const char* weights, double width) {
    const Sizes& s = out.sizes();
    if (s.flow) out.add(kOwnFfn, "backward", 2, 2 * s.tokens * s.hidden / f64(kBlock) * (1 + kWord));
    Experts(out, s.tokens, 1, width, weights).backward();
}

// The shared expert, and its gate: logits, their choice and its counter; gradients of both.
void shared_forward(Stages& out, const char* direction) {
    const Sizes& s = out.sizes();
    if (s.gated) out.add(kOwnFfn, direction, 3, s.tokens * (s.hidden * kPlain + 5 * kWord));
    own_ffn_forward(out, "moe.shared_experts", s.shared, direction);
}
void shared_backward(Stages& out, const RecomputeSpec& recompute) {
    const Sizes& s = out.sizes();
    if (recompute.shared_experts) shared_forward(out, "backward");
    own_ffn_backward(out, "moe.shared_experts", s.shared);
    if (s.gated) out.add(kOwnFfn, "backward", 4, s.tokens * (3 * s.hidden * kPlain + 8 * kWord));
}

// dY of a block in FP8: the one cast of the flow.
void gradient_cast(Stages& out) {
    const Sizes& s = out.sizes();
    if (s.flow) out.add("cast", "backward", 1, s.tokens * s.hidden * (kPlain + s.wire));
}

void route_and_plan(Stages& out, const Legs& legs, const char* direction) {
    const Sizes& s = out.sizes();
    const double logits = kWord * s.tokens * s.experts, choice = 2 * kWord * s.tokens * s.topk;
    out.gemm("route", direction, s.tokens * s.hidden * kPlain + s.experts * s.hidden * kPlain + logits,
             2 * s.tokens * s.hidden * s.experts, false);
    out.add("route", direction, 2, logits + choice);
    // routing of all ranks, gathered and read twice; rows received and sent; source and weight of each row
    out.add("plan", direction, 2,
            (s.ranks > 1 ? choice * (1 + s.ranks) : 0) +
                s.ranks * s.tokens * (3 * s.topk + s.topk + 2) * kWord + s.rows * 2 * kWord);
    Work& gathered = out.add("plan", direction, 0, 0);
    gathered.wire = s.ranks > 1 ? Wire::dispatch : Wire::none;
    gathered.wire_bytes += legs.routing;
}

// fp8_flow alone has saved_rows.
bool keeps(const Sizes& s, const RecomputeSpec& recompute, SavedRows rows) {
    return s.flow && recompute.moe_expert && recompute.saved_rows == rows;
}

void moe_forward(Stages& out, const Legs& legs, const char* direction) {
    const Sizes& s = out.sizes();
    route_and_plan(out, legs, direction);
    if (s.shared > 0) shared_forward(out, direction);
    dispatch(out, direction, legs);
    Experts(out, s.rows, s.local, s.ffn, "moe.experts").forward(direction);
    const double token_reads = 2 + (s.shared > 0 ? 1 : 0);
    exchange(out, "combine", direction,
             s.hidden * kPlain * (s.rows + token_reads * s.tokens) + (s.merges ? kWord * s.rows : 0),
             Wire::combine, legs.combine_forward);
}

void moe_backward(Stages& out, const Legs& legs, const RecomputeSpec& recompute) {
    const Sizes& s = out.sizes();
    if (recompute.moe || s.full) moe_forward(out, legs, "backward");
    gradient_cast(out);
    if (s.shared > 0) shared_backward(out, recompute);
    dispatch(out, "backward", legs);
    if (keeps(s, recompute, SavedRows::none)) dispatch(out, "backward", legs);
    if (keeps(s, recompute, SavedRows::received)) {
        const double sorted = s.hidden * (s.received * s.wire + s.rows * s.operand);
        out.add("dispatch", "backward", 1, sorted);
        // the forward stores the received rows and reads them back
        out.add("dispatch", "forward", 1, 2 * s.hidden * s.received * s.wire);
    }
    Experts experts(out, s.rows, s.local, s.ffn, "moe.experts");
    if (recompute.moe_expert) experts.forward("backward", false);
    if (recompute.moe_act)
        out.add("swiglu", "backward", 1, s.rows * s.ffn * (2 * kPlain + (s.flow ? s.operand : kPlain)));
    experts.backward();
    const double token_reads = 1 + (s.shared > 0 ? 1 : 0);
    exchange(out, "combine", "backward",
             s.hidden * kPlain * (s.rows + token_reads * s.tokens) + kWord * (s.rows + s.tokens * s.topk),
             Wire::combine, legs.combine_backward);
    const double logits = kWord * s.tokens * s.experts;
    out.add("route", "backward", 1, 2 * logits + 2 * kWord * s.tokens * s.topk);
    out.gemm("route", "backward",
             logits + 3 * kPlain * s.tokens * s.hidden + s.experts * s.hidden * (kPlain + kWord),
             4 * s.tokens * s.hidden * s.experts, false);
    out.add("route", "backward", 3, 0);
}

std::vector<Work> moe_work(const Config& config, const PrecisionSpec& precision, const Sizes& sizes) {
    const Legs legs = legs_of(config, precision);
    Stages out("moe layer", sizes);
    out.norm_forward(sizes.flow);
    moe_forward(out, legs, "forward");
    if (sizes.full || config.recompute.layernorm) out.norm_forward(sizes.flow, "backward");
    moe_backward(out, legs, config.recompute);
    out.norm_backward();
    return out.take();
}

std::vector<Work> dense_work(const Config& config, const Sizes& sizes) {
    const double width = f64(config.model.ffn_hidden_size);
    Stages out("dense layer", sizes);
    out.norm_forward(sizes.flow);
    own_ffn_forward(out, "mlp", width, "forward");
    const double residual = 3 * kPlain * sizes.tokens * sizes.hidden;
    out.add(kOwnFfn, "forward", 1, residual);
    if (sizes.full || config.recompute.layernorm) out.norm_forward(sizes.flow, "backward");
    if (sizes.full) own_ffn_forward(out, "mlp", width, "backward");
    gradient_cast(out);
    own_ffn_backward(out, "mlp", width);
    out.norm_backward();
    return out.take();
}

// One projection [N, K] of attention over a rank's own rows: BF16, or FP8 with its casts and transposes. The
// flow casts what no norm and no backward of the heads has quantised.
class ProjectionWork {
public:
    ProjectionWork(Stages& stages, bool fp8, const char* stage, const plan::AttentionWeight& weight)
        : out_(stages),
          s_(stages.sizes()),
          fp8_(fp8 && weight.fp8),
          stage_(stage),
          n_(f64(weight.n)),
          k_(f64(weight.k)),
          trained_(trained_share(s_.config, fmt::format("self_attention.{}", weight.name))) {}

    void forward(const char* direction, bool casts) {
        if (fp8_ && casts) cast(k_, direction);
        gemm(direction, n_, k_);
    }
    void backward(bool casts) {
        if (fp8_ && casts) cast(n_, "backward");
        if (fp8_ && s_.flow)
            out_.add(stage_, "backward", 2 * trained_,
                     trained_ * s_.tokens * (n_ + k_) * (s_.operand + s_.column));
        const double bytes =
            s_.tokens * (n_ + k_) * (fp8_ ? s_.column : kPlain) + kWord * n_ * k_ * (2 - s_.first);
        const double idle = fp8_ ? idle_flops(1, n_, k_, s_.tokens, flops(), 0) : 0;
        out_.gemm(stage_, "backward", trained_ * bytes, trained_ * flops(), fp8_, trained_ * idle, trained_);
        gemm("backward", k_, n_);
    }

private:
    double flops() const { return 2 * s_.tokens * n_ * k_; }
    void gemm(const char* direction, double n, double k) {
        const double in = fp8_ ? s_.operand : kPlain, weight = fp8_ ? s_.weight : kPlain;
        out_.gemm(stage_, direction, s_.tokens * (k * in + n * kPlain) + n * k * weight, flops(), fp8_,
                  fp8_ ? idle_flops(1, s_.tokens, n, k, flops(), kTileEnd * kFp8PerCycle) : 0);
    }
    void cast(double width, const char* direction) {
        out_.add("cast", direction, 1, s_.tokens * width * (kPlain + (s_.flow ? 1 : 2) * s_.operand));
    }

    Stages& out_;
    const Sizes& s_;
    bool fp8_;
    const char* stage_;
    double n_, k_, trained_;
};

// From the norm's output to q, k and v, and back.
class HeadWork {
public:
    enum class Part { all, again };  // again: what mla_up_proj runs again

    HeadWork(const Config& config, Stages& stages, bool linears)
        : m_(config.model), out_(stages), s_(stages.sizes()), fp8_rows_(linears && s_.flow) {
        for (const plan::AttentionWeight& weight : plan::attention_weights(m_))
            if (weight.input != plan::AttentionWeight::Input::heads)
                weights_.push_back({ProjectionWork(stages, linears, "qkv", weight), weight.again});
    }

    void forward(const char* direction, Part part) const {
        for (Projected one : weights_)
            if (part == Part::all || one.again) one.work.forward(direction, !s_.flow);
        if (!m_.multi_latent_attention)
            return void(out_.add("qkv", direction, 1, s_.tokens * (2 * kPlain * columns() + normed())));
        out_.add("norm", direction, 2, s_.tokens * latents() * (2 * kPlain + (fp8_rows_ ? s_.operand : 0)));
        out_.add("qkv", direction, 2, s_.tokens * 2 * kPlain * (latent_columns() + f64(m_.kv_lora_rank)));
    }
    void backward() const {
        if (m_.multi_latent_attention) {
            out_.add("qkv", "backward", 3,
                     s_.tokens * kPlain * (2 * latent_columns() + 2 * f64(m_.kv_lora_rank) + 3 * s_.hidden));
            out_.add("norm", "backward", 4, s_.tokens * latents() * 3 * kPlain);
        } else {
            const double written = fp8_rows_ ? s_.operand : kPlain;
            out_.add("qkv", "backward", 2, s_.tokens * ((kPlain + written) * columns() + normed()));
        }
        for (Projected one : weights_) one.work.backward(!s_.flow || m_.multi_latent_attention);
    }

private:
    struct Projected {
        ProjectionWork work;
        bool again;
    };
    double heads() const { return f64(m_.num_attention_heads); }
    double columns() const { return (heads() + 2 * f64(m_.num_query_groups)) * f64(m_.kv_channels); }
    // Bytes that the norm of the heads reads or writes in addition.
    double normed() const {
        const double rows = heads() + f64(m_.num_query_groups);
        return m_.qk_layernorm ? rows * (kPlain * f64(m_.kv_channels) + kWord) : 0;
    }
    double latents() const { return f64(m_.q_lora_rank + m_.kv_lora_rank); }
    // Of k and v, and those of q that rotate.
    double latent_columns() const { return heads() * f64(m_.qk_dim() + m_.v_dim() + m_.qk_pos_emb_head_dim); }

    const ModelSpec& m_;
    Stages& out_;
    const Sizes& s_;
    bool fp8_rows_;
    std::vector<Projected> weights_;
};

std::vector<Work> attention_work(const Config& config, const PrecisionSpec& precision, const Sizes& s) {
    const ModelSpec& m = config.model;
    if (!m.attention) return {};
    const double heads = f64(m.num_attention_heads), groups = f64(m.kv_heads()), dim = f64(m.qk_dim()),
                 v_dim = f64(m.v_dim()), t = s.tokens, h = s.hidden;
    const double q = heads * dim, v = heads * v_dim, qkv = q + groups * (dim + v_dim);
    const double keys = t * (f64(m.seq_length) + 1);  // FLOPs of one causal GEMM per column
    // computed in tiles of 128 x 128 above the diagonal, as a share of the FLOPs that count
    const double above = 127 / (f64(m.seq_length) + 1);
    Stages out("attention", s);
    const bool linears = s.fp8 && precision.fp8_attention_linears, wire_rows = linears && s.flow;
    const HeadWork heads_work(config, out, linears);
    ProjectionWork proj_work(out, linears, "proj", plan::attention_weights(m).back());
    const auto core_forward = [&](const char* direction) {
        out.gemm("core attention", direction, kPlain * t * (v + qkv) + kWord * t * heads, keys * (q + v),
                 false, keys * (q + v) * above);
        out.add("core attention", direction, 2, 0);
    };
    const auto project = [&](const char* direction) {
        proj_work.forward(direction, true);
        out.add("proj", direction, 1, 3 * kPlain * t * h);
    };
    out.norm_forward(wire_rows);
    heads_work.forward("forward", HeadWork::Part::all);
    core_forward("forward");
    project("forward");
    if (s.full || config.recompute.layernorm) out.norm_forward(wire_rows, "backward");
    if (s.full) heads_work.forward("backward", HeadWork::Part::all);
    if (config.recompute.mla_up_proj) heads_work.forward("backward", HeadWork::Part::again);
    if (s.full || config.recompute.core_attn) core_forward("backward");
    if (s.full) project("backward");
    proj_work.backward(true);
    out.gemm("core attention", "backward", kPlain * t * (2 * v + 2 * qkv) + kWord * t * heads,
             keys * (3 * q + 2 * v), false, keys * (3 * q + 2 * v) * above);
    out.add("core attention", "backward", 6, 0);
    heads_work.backward();
    out.norm_backward();
    return out.take();
}

}  // namespace

bool knows(const PrecisionSpec& precision) {
    if (!precision.flow.empty()) return false;
    switch (precision.recipe) {
        case Recipe::bf16: return true;
        case Recipe::fp8_blockwise: return precision.fp8_wgrad;
        case Recipe::fp8_flow: return !is_ablation(precision) && precision.moe_norm_quantize_fusion;
        default: return false;
    }
}

double trained_share(const Config& config, std::string_view weight) {
    const Freeze& freeze = config.training.freeze;
    if (freeze.names.empty()) return 1;
    double layers = 0, trained = 0;
    for (size_t i = 0; i < config.model.moe_layer_freq.size(); ++i) {
        if (weight.starts_with(config.model.moe_layer_freq[i] == 1 ? "mlp." : "moe.")) continue;
        layers += 1;
        trained += is_frozen(freeze, fmt::format("layers.{}.{}.weight", i, weight)) ? 0 : 1;
    }
    return layers > 0 ? trained / layers : 1;
}

LayerWork layer_work(const Config& config, const PrecisionSpec& precision, double accumulates) {
    const Sizes sizes{config, precision, 1 - accumulates};
    return {.moe = moe_work(config, precision, sizes),
            .attention = attention_work(config, precision, sizes),
            .dense = dense_work(config, sizes)};
}

}  // namespace fp8flow::predict
