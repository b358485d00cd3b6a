// SPDX-License-Identifier: MIT
// A recipe of your own for the program: a shared library for `fp8flow train|validate|profile|plan|replay
// CONFIG --plugin FILE`. It derives a class from CastFlow, Fp8Flow or Flow and registers it under a name:
//
//   FP8FLOW_RECIPES(fp8flow::register_flow<Mine>("mine", fp8flow::Recipe::fp8_blockwise))
//
// Step by step: docs/usage/new_recipe.md; an example: examples/custom_recipe.cpp. The library links nothing:
// the program has what these headers declare. Build it with the headers and the compiler of the program.
#pragma once

#include "kernels/core/error.h"
#include "layers/flows/cast_flow.h"
#include "layers/flows/fp8_flow.h"

#include <cstdint>

namespace fp8flow {

// What a flow and the program hand each other, by its sizes: a library that was built with other headers is
// refused where one of them has changed, or where a member has come without changing a size (the first
// number: 1 since ScaledTensor::format).
inline constexpr uint64_t kRecipeHeaders = [] {
    uint64_t hash = 1;
    for (const uint64_t size :
         {sizeof(Context), sizeof(PrecisionSpec), sizeof(RecomputeSpec), sizeof(CastFlow), sizeof(Fp8Flow),
          sizeof(Flow::Forward), sizeof(Flow::Backward), sizeof(ExpertsSaved), sizeof(Parameter), sizeof(Ops),
          sizeof(Exchange)})
        hash = hash * 1'000'003 + size;
    return hash;
}();

struct RecipePlugin {
    uint64_t headers;
    void (*register_flows)();
};

}  // namespace fp8flow

// What the library exports; the argument is a call of register_flow, or several after commas.
#define FP8FLOW_RECIPES(...) \
    extern "C" const fp8flow::RecipePlugin fp8flow_recipes{fp8flow::kRecipeHeaders, [] { (__VA_ARGS__); }};
extern "C" const fp8flow::RecipePlugin fp8flow_recipes;
