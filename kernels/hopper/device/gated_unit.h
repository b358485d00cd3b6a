// SPDX-License-Identifier: MIT
// A column of SwiGLU or of another gated unit (op::GluForm). Kernels take the unit as a type, so that SwiGLU
// has no instruction of the other form.
#pragma once

#include "kernels/core/scalar_math.h"
#include "kernels/ops/swiglu.h"

#include <limits>
#include <utility>

namespace fp8flow::hopper {

struct SwigluUnit {
    FP8FLOW_HD float gate(float g) const { return g; }
    FP8FLOW_HD float argument(float g) const { return g; }  // of the sigmoid, for a gate after gate()
    FP8FLOW_HD float up(float u) const { return u; }
    // Gradients of what gate() and up() got.
    FP8FLOW_HD float dgate(float gradient, float) const { return gradient; }
    FP8FLOW_HD float dup(float gradient, float) const { return gradient; }
};

struct ShapedUnit {
    float alpha, offset, limit;  // limit: infinity for none

    explicit ShapedUnit(const op::GluForm& form)
        : alpha(form.alpha),
          offset(form.offset),
          limit(form.limit > 0.0f ? form.limit : std::numeric_limits<float>::infinity()) {}
    // Comparisons let NaN through.
    FP8FLOW_HD float gate(float g) const { return g > limit ? limit : g; }
    FP8FLOW_HD float argument(float g) const { return alpha * g; }
    FP8FLOW_HD float up(float u) const { return (u > limit ? limit : u < -limit ? -limit : u) + offset; }
    FP8FLOW_HD float dgate(float gradient, float g) const { return g > limit ? 0.0f : gradient; }
    FP8FLOW_HD float dup(float gradient, float u) const { return u > limit || u < -limit ? 0.0f : gradient; }
};

// Arguments of a kernel with the unit that it computes.
template <class Args> struct Shaped : Args { ShapedUnit unit; };
template <class Args> FP8FLOW_HD SwigluUnit unit_of(const Args&) { return {}; }
template <class Args> FP8FLOW_HD ShapedUnit unit_of(const Shaped<Args>& args) { return args.unit; }
template <class Args> using UnitOf = decltype(unit_of(std::declval<const Args&>()));

// work(args) for SwiGLU, work(Shaped) for another form.
template <class Args, class Work> void with_unit(const op::GluForm& form, const Args& args, Work work) {
    if (form.is_swiglu())
        work(args);
    else
        work(Shaped<Args>{args, ShapedUnit(form)});
}

}  // namespace fp8flow::hopper
