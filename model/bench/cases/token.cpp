// SPDX-License-Identifier: MIT
// Bench cases of the two ends of the model and of element-wise operations.
#include "model/bench/cases/case.h"

namespace fp8flow::bench {

namespace {

constexpr std::initializer_list<DType> kReal = {DType::bf16, DType::f32};
constexpr std::initializer_list<DType> kPlain = {DType::bf16, DType::f16, DType::f32};
const Key kDtype = {"dtype", "bf16", "bf16", "bf16 | f32"};
const Keys kTable = {{"T", "4096", "24", "tokens"},
                     {"V", "129280", "100", "rows of the table"},
                     {"H", "7168", "256", "columns"}};
const Keys kElements = {{"T", "4096", "40", "rows"}, {"H", "7168", "256", "columns"}};

op::Embedding look_up(Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), rows = shape.positive("V"), columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", kReal);
    return {.ids = buffers.integers(DType::i32, {tokens}, rows),
            .table = buffers.normal(dtype, {rows, columns}),
            .y = buffers.output(dtype, {tokens, columns})};
}

op::EmbeddingBackward look_up_backward(Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), rows = shape.positive("V"), columns = shape.positive("H");
    return {.ids = buffers.integers(DType::i32, {tokens}, rows),
            .dy = buffers.normal(shape.dtype("dtype", kReal), {tokens, columns}),
            .mode = shape.gradient(),
            .dtable = buffers.zeros(DType::f32, {rows, columns})};
}

Call cross_entropy(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), columns = shape.positive("V");
    op::CrossEntropy args{.logits = buffers.normal(DType::f32, {tokens, columns}),
                          .labels = buffers.integers(DType::i32, {tokens}, columns),
                          .vocab_size = columns,
                          .loss = buffers.output(DType::f32, {tokens})};
    if (shape.yes("gradient")) args.dlogits = buffers.output(shape.dtype("dtype", kReal), {tokens, columns});
    return call_of(machine, &Ops::cross_entropy, args);
}

op::Sum sum(Buffers& buffers, const Shape& shape) {
    return {.values = buffers.normal(DType::f32, {shape.number("N")}), .sum = buffers.zeros(DType::f32, {1})};
}

op::Add add(Buffers& buffers, const Shape& shape) {
    const int64_t rows = shape.number("T"), columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", kPlain);
    return {.a = buffers.normal(dtype, {rows, columns}),
            .b = buffers.normal(dtype, {rows, columns}),
            .y = buffers.output(dtype, {rows, columns})};
}

op::Cast cast(Buffers& buffers, const Shape& shape) {
    const int64_t rows = shape.number("T"), columns = shape.positive("H");
    return {.x = buffers.normal(shape.dtype("from", kPlain), {rows, columns}),
            .y = buffers.output(shape.dtype("to", kPlain), {rows, columns})};
}

op::Zero zero(Buffers& buffers, const Shape& shape) {
    return {.y = buffers.output(shape.dtype("dtype", kPlain), {shape.number("T"), shape.positive("H")})};
}

op::FillNormal fill_normal(Buffers& buffers, const Shape& shape) {
    return {.y = buffers.output(DType::f32, {shape.number("T"), shape.positive("H")})};
}

op::CountNonFinite count_non_finite(Buffers& buffers, const Shape& shape) {
    const DType dtype = shape.dtype("dtype", {DType::bf16, DType::f16, DType::f32, DType::e4m3, DType::e5m2});
    return {.x = buffers.normal(dtype, {shape.number("T"), shape.positive("H")}),
            .count = buffers.zeros(DType::i64, {1}),
            .first = buffers.values(std::vector<int64_t>{-1})};
}

const Key kAnyPlain = {"dtype", "bf16", "bf16", "bf16 | f16 | f32"};

}  // namespace

std::vector<Case> token_cases() {
    return {{"embedding", "rows of a table by token", kTable + Keys{kDtype}, local<&Ops::embedding, look_up>},
            {"embedding_backward", "gradient of the table",
             kTable + Keys{kDtype, {"mode", "accumulate", "accumulate", "dtable: overwrite | accumulate"}},
             local<&Ops::embedding_backward, look_up_backward>},
            {"cross_entropy",
             "loss and gradient of the logits",
             {{"T", "1024", "24", "tokens"},
              {"V", "129280", "300", "vocabulary"},
              {"gradient", "yes", "yes", "also the gradient: yes | no"},
              {"dtype", "bf16", "bf16", "of the gradient: bf16 | f32"}},
             cross_entropy},
            {"sum", "sum of values, in order", {{"N", "4096", "100", "values"}}, local<&Ops::sum, sum>},
            {"add", "y = a + b", kElements + Keys{kAnyPlain}, local<&Ops::add, add>},
            {"cast", "another float type",
             kElements +
                 Keys{{"from", "f32", "f32", "bf16 | f16 | f32"}, {"to", "bf16", "bf16", "bf16 | f16 | f32"}},
             local<&Ops::cast, cast>},
            {"fill_normal", "normal random numbers by global index", kElements,
             local<&Ops::fill_normal, fill_normal>},
            {"zero", "zeros", kElements + Keys{kAnyPlain}, local<&Ops::zero, zero>},
            {"count_non_finite", "NaN and Inf of a tensor",
             kElements + Keys{{"dtype", "bf16", "bf16", "bf16 | f16 | f32 | e4m3 | e5m2"}},
             local<&Ops::count_non_finite, count_non_finite>}};
}

}  // namespace fp8flow::bench
