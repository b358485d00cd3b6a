// SPDX-License-Identifier: MIT
// Panels of group_columns.cu: 64, 32 or 16 columns of a group, how wide they are, and which comes next, found
// by a warp on the device.
#pragma once

#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/quantize/column_codes.h"

namespace fp8flow::hopper {

// A tile: 16 KB, as many rows as fit; kPartRows of them where a row has 1 << kWidestTile units (128 bytes),
// more where the panel is narrower.
constexpr int kPanelSlots = 14;  // tiles of a CTA that are on chip
constexpr int kPanelTileBytes = 16384, kPartRows = static_cast<int>(kBlock);
constexpr int kNarrowestTile = 1;
__host__ __device__ constexpr int panel_columns(int shift) { return kUnit << shift; }
__host__ __device__ constexpr int panel_tile_rows(int shift) { return kPartRows << (kWidestTile - shift); }
// A group's tiles are counted from a multiple of so many rows of the output: whole sectors.
constexpr int kPanelSector = 32;
// Panels as wide as can be are numbered so many columns of a group at a time.
constexpr int kPanelBlockColumns = 256;
constexpr int kNarrowTurns = 1;  // of all SMs, at the end

struct Panel {
    int group, col, shift;    // its first column; a row has 1 << shift units
    int offset, rows, count;  // of the group: its first row, with pads, without
    int lead, tiles;          // rows of the first tile before the group's first
};

// Finds panels by rising numbers: a block of columns of every group, then the next block; so that what
// neighbouring groups share of a sector is written, and what neighbouring panels share of 256 bytes is read,
// at about the same time. Panels are as wide as costs least: narrow ones have more rows on chip, wide ones
// are read faster. So that all SMs end together, the last ones are narrower and come group after
// group, the largest first (of up to 32 groups: more of them are small against the launch). A lane knows one
// of 32 groups; all lanes call everything together.
class PanelFinder {
public:
    // extent: end of the only group where there are no groups.
    __device__ PanelFinder(const DeviceGroups& groups, int64_t extent, int64_t dst_base, int cols)
        : groups_(groups),
          extent_(extent),
          lead_base_(static_cast<int>(dst_base % kPanelSector)),
          lane_(static_cast<int>(threadIdx.x) % kWindow),
          cols_(cols) {
        choose_width();
        number_panels();
        rank_groups();
    }
    __device__ int panels() const { return wide_items_ + narrow_items_; }
    __device__ Panel find(int number) {
        const bool narrow = number >= wide_items_;
        const int index = narrow ? number - wide_items_ : number, shift = narrow ? shift_ - 1 : shift_,
                  panels = narrow ? narrow_panels_ : wide_panels_, columns = panel_columns(shift),
                  groups = static_cast<int>(groups_.num_groups);
        // side by side: of few large groups many columns, so that long pieces of rows are read
        const int side = shift == kWidestTile ? kPanelBlockColumns / columns : panels,
                  block = index / (groups * side), rest = index - block * groups * side,
                  here = min(side, panels - block * side), place = rest / here;
        const int group = narrow ? group_of_rank(place) : place;
        if (group / kWindow != window_) look(group / kWindow);
        const auto of_group = [group](int value) { return __shfl_sync(kFullMask, value, group % kWindow); };
        Panel panel = {};
        panel.group = group;
        panel.col = (narrow ? wide_panels_ * panel_columns(shift_) : 0) +
                    (block * side + rest - place * here) * columns;
        panel.shift = shift;
        panel.offset = of_group(begin_);
        panel.rows = of_group(rows_);
        panel.count = of_group(count_);
        panel.lead = lead(panel.offset);
        panel.tiles = tiles(panel.lead + panel.rows, shift);
        return panel;
    }

private:
    static constexpr int kWindow = 32;

    __device__ static int tiles(int rows, int shift) {
        return max(1, (rows + panel_tile_rows(shift) - 1) / panel_tile_rows(shift));
    }
    __device__ int lead(int offset) const { return (lead_base_ + offset) % kPanelSector; }
    // Learns the groups from window * kWindow on.
    __device__ void look(int window) {
        window_ = window;
        begin_ = rows_ = count_ = 0;
        const int64_t group = int64_t{window} * kWindow + lane_;
        if (group >= groups_.num_groups) return;
        const int64_t begin = groups_.offset(group),
                      end = groups_.counts != nullptr ? groups_.offset(group + 1) : extent_;
        count_ = static_cast<int>(groups_.count(group));
        begin_ = static_cast<int>(begin);
        rows_ = static_cast<int>(end - begin);
    }
    // Ends with the first window.
    __device__ void choose_width() {
        constexpr float kCosts[] = {1.25f, 1.06f, 1.0f}, kReadTwice = 1.5f;
        float costs[3] = {};
        for (int window = (static_cast<int>(groups_.num_groups) - 1) / kWindow; window >= 0; --window) {
            look(window);
#pragma unroll
            for (int s = kNarrowestTile; s <= kWidestTile; ++s)
                costs[s - 1] += static_cast<float>(rows_) * kCosts[s - 1] *
                                (tiles(lead(begin_) + rows_, s) > kPanelSlots ? kReadTwice : 1.0f);
        }
        shift_ = kWidestTile;
        float least = 0;
#pragma unroll
        for (int s = kWidestTile; s >= kNarrowestTile; --s) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2)
                costs[s - 1] += __shfl_xor_sync(kFullMask, costs[s - 1], step);
            if (s == kWidestTile || costs[s - 1] < least) {
                least = costs[s - 1];
                shift_ = s;
            }
        }
    }
    __device__ void number_panels() {
        const int groups = static_cast<int>(groups_.num_groups), columns = panel_columns(shift_),
                  panels = (cols_ - 1) / columns + 1;
        const int tail =
            shift_ == kWidestTile
                ? min(panels / 2, (static_cast<int>(gridDim.x) * kNarrowTurns + groups - 1) / groups)
                : 0;
        wide_panels_ = panels - tail;
        narrow_panels_ = tail == 0 ? 0 : (cols_ - wide_panels_ * columns - 1) / (columns / 2) + 1;
        wide_items_ = wide_panels_ * groups;
        narrow_items_ = narrow_panels_ * groups;
    }
    __device__ void rank_groups() {
        rank_ = 0;
#pragma unroll 4
        for (int other = 0; other < kWindow; ++other) {
            const int rows = __shfl_sync(kFullMask, rows_, other);
            rank_ += rows > rows_ || (rows == rows_ && other < lane_) ? 1 : 0;
        }
    }
    // The group before which `rank` larger ones come.
    __device__ int group_of_rank(int rank) const {
        if (groups_.num_groups > kWindow) return rank;
        return __ffs(static_cast<int>(__ballot_sync(kFullMask, rank_ == rank))) - 1;
    }

    const DeviceGroups& groups_;
    const int64_t extent_;
    const int lead_base_, lane_, cols_;
    int shift_;
    int wide_panels_, narrow_panels_, wide_items_, narrow_items_;
    int window_, begin_, rows_, count_;  // of this lane's group among those of the window
    int rank_;                           // of it in the first window: how many are larger
};

}  // namespace fp8flow::hopper
