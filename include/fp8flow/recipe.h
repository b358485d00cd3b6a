// SPDX-License-Identifier: MIT
// A recipe of your own for the program: a shared library for `fp8flow train|validate|profile|plan|replay
// CONFIG --plugin FILE`. It derives a class from CastFlow, Fp8Flow or Flow and registers it under a name:
//
//   FP8FLOW_RECIPES(fp8flow::register_flow<Mine>("mine", fp8flow::Recipe::fp8_flow))
//
// Step by step: docs/usage/new_recipe.md; an example: examples/custom_recipe.cpp. The library links nothing:
// the program has what these headers declare. Build it with the headers and the compiler of the program.
#pragma once

#include "kernels/core/error.h"
#include "layers/flows/cast_flow.h"
#include "layers/flows/fp8_flow.h"

#include <cstdint>

namespace fp8flow {

// A hash of the sizes of all types that a flow and the program exchange. The program rejects a library with
// another hash, since it was built with other headers. A new member may leave every size as it was; then the
// first number is increased (2: Flow::rule_of; 3: PrecisionSpec).
inline constexpr uint64_t kRecipeHeaders = [] {
    uint64_t hash = 3;
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
