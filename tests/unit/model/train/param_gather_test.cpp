// SPDX-License-Identifier: MIT
// overlap_param_gather: copies that are gathered in parallel with the layers, on streams that work as late as
// they may (tests/support/layers/late_stream.h), give the bits of copies that are there before the step.
#include "model/config/config.h"
#include "tests/support/layers/layer_fixture.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

namespace fp8flow::test {
namespace {

enum class Gather { before, overlapped };

// As an update leaves them: of a plain copy this rank's slice is there, of FP8 copies nothing.
void make_stale(RankFixture& rank, ParameterStore& parameters) {
    const auto poison = [&](const TensorView& view, int64_t first, int64_t count) {
        const int64_t element = size_of(view.dtype);
        rank.ops.device().fill(view.bytes_ptr() + first * element, 0xFF, static_cast<size_t>(count * element),
                               {});
    };
    for (const Parameter& p : parameters.all()) {
        if (!p.is_sharded()) continue;
        const int64_t end = p.slice.first + p.slice.count;
        for (const ScaledTensor& copy : {p.fprop, p.dgrad})
            if (copy)
                for (const TensorView& view : {copy.data, copy.scales}) poison(view, 0, view.numel());
        if (!p.plain) continue;
        poison(p.plain, 0, p.slice.first);
        poison(p.plain, end, p.numel() - end);
    }
}

LayerResult train_once(ProcessGroup& group, const LayerCase& c, Gather gather) {
    ModelFixture model(group, c);
    RankFixture& rank = model.rank();
    make_stale(rank, model.parameters());
    if (gather == Gather::before)
        model.parameters().gather_copies(rank.exchange, 0, model.parameters().all().size());
    HostTensor loss(DType::f32, {1});
    loss.as<float>()[0] = 0;
    Context ctx = rank.context();
    ctx.overlaps_param_gather = gather == Gather::overlapped;
    model.model().begin_step(ctx);
    Transformer::MicroBatch batch{.tokens = model.tokens(),
                                  .labels = model.tokens(),
                                  .loss_scale = 1.0f / static_cast<float>(ctx.global_tokens),
                                  .loss_sum = loss};
    model.model().forward(ctx, batch);
    model.model().backward(ctx, batch);
    rank.wire->join(ctx);
    rank.ops.device().synchronize();
    LayerResult result;
    read_rank(rank, model.parameters(), result);
    result.loss = loss.as<float>()[0];
    return result;
}

TEST(ParamGather, BesideTheLayersChangesNoBit) {
    for (const Recipe recipe : {Recipe::bf16, Recipe::fp8_flow, Recipe::fp8_tensorwise})
        for (const bool with_side_stream : {false, true}) {
            LayerCase c = LayerCase::of(recipe);
            c.tokens = {32, 32};
            c.divided_state = true;
            c.model.attention = true;
            c.model.num_layers = 3;
            c.model.moe_layer_freq = {0, 1, 0};  // no call of the exchange in the last
            c.moe.moe_shared_expert_intermediate_size = 128;
            c.schedule.overlap_param_gather = true;
            c.schedule.moe_shared_expert_overlap = c.schedule.delay_wgrad_compute = with_side_stream;
            const auto run = [&](Gather gather) {
                return on_ranks(c, [&](ProcessGroup& group) { return train_once(group, c, gather); });
            };
            const std::vector<LayerResult> wanted = run(Gather::before);
            for (const bool main_is_late : {false, true}) {
                SCOPED_TRACE(fmt::format("{}, side stream {}, main is late {}", recipe_name(recipe),
                                         with_side_stream, main_is_late));
                c.main_is_late = main_is_late;
                expect_same_results(run(Gather::overlapped), wanted);
                for (const LayerResult& one : wanted) EXPECT_TRUE(std::isfinite(one.loss));
            }
            c.main_is_late = false;
        }
}

}  // namespace
}  // namespace fp8flow::test
