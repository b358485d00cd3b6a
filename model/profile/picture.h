// SPDX-License-Identifier: MIT
// What the pictures of a profile and its report.html show alike. Read next: picture.cpp.
#pragma once

#include "model/profile/profile.h"

#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::profile {

// Categories of stages, each with the colour of the palette at its place; the last is "other".
std::string name_of_category(size_t category);
std::string name_of_lane(size_t lane);
std::vector<size_t> lane_order();  // from top to bottom

struct Box {
    size_t lane, category;
    double begin, end;  // seconds in the window
    std::string tooltip;
};
// A MoE layer's way in one direction, and all that ran meanwhile.
struct Window {
    double seconds = 0;
    std::vector<Box> boxes;
};
// Of the middle micro-batch of the first MoE layer.
Window window_of(const std::vector<StageSpan>& trace, std::string_view direction);

// What a direction of an arm takes, by category: its time from end to end without the stage timer, divided as
// the stages' own times are.
std::vector<double> milliseconds_of(const ArmProfile& arm, std::string_view direction);
// "1.42x" of the first arm's layer over this one's; "1.00x" of the first itself; or "not resolved"
std::string speed_up_text(const Profile& profile, const ArmProfile& arm, std::string_view unit = "x");
// "fp8_flow: 3.210 ms, 1.42 x"
std::string heading_of(const Profile& profile, const ArmProfile& arm);
// "layer_mixtral_8x7b, one MoE layer on 4 GPUs: fp8_flow 1.42 x as fast as bf16"
std::string title_of(const Profile& profile, const std::string& what);

}  // namespace fp8flow::profile
