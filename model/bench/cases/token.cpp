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

Call look_up(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), rows = shape.positive("V"), columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", kReal);
    const op::Embedding args{.ids = buffers.integers(DType::i32, {tokens}, rows),
                             .table = buffers.normal(dtype, {rows, columns}),
                             .y = buffers.output(dtype, {tokens, columns})};
    return call_of(machine, &Ops::embedding, args);
}

Call look_up_backward(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t tokens = shape.number("T"), rows = shape.positive("V"), columns = shape.positive("H");
    const op::EmbeddingBackward args{.ids = buffers.integers(DType::i32, {tokens}, rows),
                                     .dy = buffers.normal(shape.dtype("dtype", kReal), {tokens, columns}),
                                     .mode = shape.gradient(),
                                     .dtable = buffers.zeros(DType::f32, {rows, columns})};
    return call_of(machine, &Ops::embedding_backward, args);
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

Call sum(Machine& machine, Buffers& buffers, const Shape& shape) {
    const op::Sum args{.values = buffers.normal(DType::f32, {shape.number("N")}),
                       .sum = buffers.zeros(DType::f32, {1})};
    return call_of(machine, &Ops::sum, args);
}

Call add(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t rows = shape.number("T"), columns = shape.positive("H");
    const DType dtype = shape.dtype("dtype", kPlain);
    const op::Add args{.a = buffers.normal(dtype, {rows, columns}),
                       .b = buffers.normal(dtype, {rows, columns}),
                       .y = buffers.output(dtype, {rows, columns})};
    return call_of(machine, &Ops::add, args);
}

Call cast(Machine& machine, Buffers& buffers, const Shape& shape) {
    const int64_t rows = shape.number("T"), columns = shape.positive("H");
    const op::Cast args{.x = buffers.normal(shape.dtype("from", kPlain), {rows, columns}),
                        .y = buffers.output(shape.dtype("to", kPlain), {rows, columns})};
    return call_of(machine, &Ops::cast, args);
}

Call zero(Machine& machine, Buffers& buffers, const Shape& shape) {
    const op::Zero args{
        .y = buffers.output(shape.dtype("dtype", kPlain), {shape.number("T"), shape.positive("H")})};
    return call_of(machine, &Ops::zero, args);
}

Call fill_normal(Machine& machine, Buffers& buffers, const Shape& shape) {
    const op::FillNormal args{.y = buffers.output(DType::f32, {shape.number("T"), shape.positive("H")})};
    return call_of(machine, &Ops::fill_normal, args);
}

Call count_non_finite(Machine& machine, Buffers& buffers, const Shape& shape) {
    const DType dtype = shape.dtype("dtype", {DType::bf16, DType::f16, DType::f32, DType::e4m3, DType::e5m2});
    const op::CountNonFinite args{.x = buffers.normal(dtype, {shape.number("T"), shape.positive("H")}),
                                  .count = buffers.zeros(DType::i64, {1}),
                                  .first = buffers.values(std::vector<int64_t>{-1})};
    return call_of(machine, &Ops::count_non_finite, args);
}

const Key kAnyPlain = {"dtype", "bf16", "bf16", "bf16 | f16 | f32"};

}  // namespace

std::vector<Case> token_cases() {
    return {
        {"embedding", "rows of a table by token", kTable + Keys{kDtype}, look_up},
        {"embedding_backward", "gradient of the table",
         kTable + Keys{kDtype, {"mode", "accumulate", "accumulate", "dtable: overwrite | accumulate"}},
         look_up_backward},
        {"cross_entropy",
         "loss and gradient of the logits",
         {{"T", "1024", "24", "tokens"},
          {"V", "129280", "300", "vocabulary"},
          {"gradient", "yes", "yes", "also the gradient: yes | no"},
          {"dtype", "bf16", "bf16", "of the gradient: bf16 | f32"}},
         cross_entropy},
        {"sum", "sum of values, in order", {{"N", "4096", "100", "values"}}, sum},
        {"add", "y = a + b", kElements + Keys{kAnyPlain}, add},
        {"cast", "another float type",
         kElements +
             Keys{{"from", "f32", "f32", "bf16 | f16 | f32"}, {"to", "bf16", "bf16", "bf16 | f16 | f32"}},
         cast},
        {"fill_normal", "normal random numbers by global index", kElements, fill_normal},
        {"zero", "zeros", kElements + Keys{kAnyPlain}, zero},
        {"count_non_finite", "NaN and Inf of a tensor",
         kElements + Keys{{"dtype", "bf16", "bf16", "bf16 | f16 | f32 | e4m3 | e5m2"}}, count_non_finite}};
}

}  // namespace fp8flow::bench
