// SPDX-License-Identifier: MIT
// Argument checks and costs of embedding, cross-entropy and the element-wise ops.
#include "kernels/ops.h"
#include "kernels/ops/check_helpers.h"

namespace fp8flow {

namespace {

void check_same_shape(const TensorView& a, const TensorView& b, const char* what) {
    bool same = a.rank == b.rank && a.rank >= 1;
    for (int i = 0; i < a.rank && same; ++i) same = a.dims[i] == b.dims[i];
    FP8FLOW_CHECK(same, "{} is {}, the output is {}", what, describe(a), describe(b));
    check_own_rows(a, what);
    check_own_rows(b, "the output");
}

}  // namespace

void check(const op::Embedding& args) {
    check_plain(args.table, "table", {kAny, kAny});
    check_plain(args.y, "y", {kAny, args.table.dim(1)});
    check_tensor(args.ids, "ids", DType::i32, {args.y.dim(0)});
}
OpCost cost(const op::Embedding& args) {
    return moves(bytes_of({args.ids}) + count_of(args.y) * static_cast<double>(size_of(args.table.dtype)),
                 bytes_of({args.y}));
}

void check(const op::EmbeddingBackward& args) {
    check_plain(args.dy, "dy", {kAny, kAny});
    check_tensor(args.dtable, "dtable", DType::f32, {kAny, args.dy.dim(1)});
    check_tensor(args.ids, "ids", DType::i32, {args.dy.dim(0)});
}
OpCost cost(const op::EmbeddingBackward& args) {
    const double cleared = args.mode == Gradient::overwrite ? bytes_of({args.dtable}) : 0;
    return moves(bytes_of({args.ids, args.dy}) + 4 * count_of(args.dy), 4 * count_of(args.dy) + cleared,
                 count_of(args.dy));
}

void check(const op::CrossEntropy& args) {
    check_tensor(args.logits, "logits", DType::f32, {kAny, kAny});
    const int64_t tokens = args.logits.dim(0), columns = args.logits.dim(1);
    check_tensor(args.labels, "labels", DType::i32, {tokens});
    check_tensor(args.loss, "loss", DType::f32, {tokens});
    FP8FLOW_CHECK(args.vocab_size >= 1 && args.vocab_size <= columns, "vocab_size {} of {} columns",
                  args.vocab_size, columns);
    if (args.dlogits) check_plain(args.dlogits, "dlogits", {tokens, columns});
}
OpCost cost(const op::CrossEntropy& args) {
    return moves({args.logits, args.labels}, {args.loss, args.dlogits}, 5 * count_of(args.logits));
}

void check(const op::Sum& args) {
    FP8FLOW_CHECK(args.values.rank >= 1 && args.values.dtype == DType::f32, "values is {}",
                  describe(args.values));
    check_own_rows(args.values, "values");
    check_tensor(args.sum, "sum", DType::f32, {1});
}
OpCost cost(const op::Sum& args) { return moves({args.values}, {args.sum}, count_of(args.values)); }

void check(const op::Add& args) {
    FP8FLOW_CHECK(is_float(args.a.dtype) && is_float(args.b.dtype) && is_float(args.y.dtype), "{} + {} -> {}",
                  describe(args.a), describe(args.b), describe(args.y));
    check_same_shape(args.a, args.y, "a");
    check_same_shape(args.b, args.y, "b");
}
OpCost cost(const op::Add& args) { return moves({args.a, args.b}, {args.y}, count_of(args.y)); }

void check(const op::Cast& args) {
    FP8FLOW_CHECK(is_float(args.x.dtype) && is_float(args.y.dtype), "{} -> {}", describe(args.x),
                  describe(args.y));
    check_same_shape(args.x, args.y, "x");
}
OpCost cost(const op::Cast& args) { return moves({args.x}, {args.y}); }

void check(const op::Zero& args) {
    FP8FLOW_CHECK(static_cast<bool>(args.y), "nothing to zero");
    check_own_rows(args.y, "y");
}
OpCost cost(const op::Zero& args) { return moves({}, {args.y}); }

void check(const op::FillNormal& args) {
    FP8FLOW_CHECK(args.y.dtype == DType::f32, "y is {}, must be f32", describe(args.y));
    FP8FLOW_CHECK(args.first >= 0, "first element {}", args.first);
    check_own_rows(args.y, "y");
}
OpCost cost(const op::FillNormal& args) { return moves({}, {args.y}); }

void check(const op::CountNonFinite& args) {
    FP8FLOW_CHECK(args.x && (is_float(args.x.dtype) || is_fp8(args.x.dtype) || args.x.dtype == DType::e8m0),
                  "x is {}", describe(args.x));
    check_own_rows(args.x, "x");
    check_tensor(args.count, "count", DType::i64, {1});
    check_tensor(args.first, "first", DType::i64, {1});
}
OpCost cost(const op::CountNonFinite& args) { return moves({args.x, args.count, args.first}, {}); }

}  // namespace fp8flow
