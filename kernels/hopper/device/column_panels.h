// Panels of quantize_group_columns.cu: 64, 32 or 16 columns of a group, how wide they are, and which comes next, found by a warp on the device.
#pragma once

#include "kernels/hopper/device/column_codes.h"

namespace fp8flow::hopper {

// A tile: 16 KB, as many rows as fit; kPartRows of them where a row has 1 << kWidestTile units (128 bytes), more where the panel is narrower.
constexpr int kPanelSlots = 14;  // tiles of a CTA that are on chip
constexpr int kPanelTileBytes = 16384, kPartRows = static_cast<int>(kBlock);
constexpr int kNarrowestTile = 1;
__host__ __device__ constexpr int panel_columns(int shift) { return kUnit << shift; }
__host__ __device__ constexpr int panel_tile_rows(int shift) { return kPartRows << (kWidestTile - shift); }
// A group's tiles are counted from a multiple of so many rows of the output: whole sectors.
constexpr int kPanelSector = 32;
// Panels as wide as can be are numbered so many columns of a group at a time.
constexpr int kPanelBlockColumns = 256;
constexpr int kNarrowTurns = 2;  // of all multiprocessors, at the end

struct Panel {
    int group, col, shift;    // its first column; a row has 1 << shift units
    int offset, rows, count;  // of the group: its first row, with pads, without
    int lead, tiles;          // rows of the first tile before the group's first
};

// Finds panels by rising numbers: a block of columns of every group, then the next block; so that what neighbouring groups share of a sector is
// written, and what neighbouring panels share of 256 bytes is read, at about the same time. Panels are as wide as costs least: narrow ones have
// more rows on chip, wide ones are read faster. The last ones are narrower, so that all multiprocessors end together.
class PanelFinder {
public:
    // extent: end of the only group where there are no groups.
    __device__ PanelFinder(const DeviceGroups& groups, int64_t extent, int64_t dst_base, int cols)
        : groups_(groups),
          extent_(extent),
          lead_base_(static_cast<int>(dst_base % kPanelSector)),
          cols_(cols) {
        choose();
    }
    __device__ int panels() const { return wide_items_ + narrow_items_; }
    // A panel, and a word a lane of what is known of its group, asked for but not waited for.
    struct Asked {
        Panel panel;
        int64_t word;
    };
    __device__ Asked ask(int number) const {
        if (number >= panels()) return {};
        Asked asked = {place(number), 0};
        const int lane = static_cast<int>(threadIdx.x) % 32, group = asked.panel.group;
        if (lane == 0) asked.word = groups_.offset(group);
        if (lane == 1) asked.word = groups_.counts != nullptr ? groups_.offset(group + 1) : extent_;
        if (lane == 2) asked.word = groups_.count(group);
        return asked;
    }
    __device__ Panel answer(const Asked& asked) const {
        Panel panel = asked.panel;
        const auto word = [&asked](int lane) {
            return static_cast<int>(__shfl_sync(kWholeWarp, asked.word, lane));
        };
        panel.offset = word(0);
        panel.rows = word(1) - panel.offset;
        panel.count = word(2);
        panel.lead = (lead_base_ + panel.offset) % kPanelSector;
        panel.tiles = tiles(panel.lead + panel.rows, panel.shift);
        return panel;
    }

private:
    __device__ static int tiles(int rows, int shift) {
        return max(1, (rows + panel_tile_rows(shift) - 1) / panel_tile_rows(shift));
    }
    __device__ void choose() {
        constexpr float kCosts[] = {1.25f, 1.06f, 1.0f}, kReadTwice = 1.5f;
        float costs[3] = {};
        for (int64_t group = threadIdx.x % 32; group < groups_.num_groups; group += 32) {
            const int64_t begin = groups_.offset(group),
                          end = groups_.counts != nullptr ? groups_.offset(group + 1) : extent_;
            const int rows = static_cast<int>(end - begin),
                      lead = static_cast<int>((lead_base_ + begin) % kPanelSector);
#pragma unroll
            for (int s = kNarrowestTile; s <= kWidestTile; ++s)
                costs[s - 1] += static_cast<float>(rows) * kCosts[s - 1] *
                                (tiles(lead + rows, s) > kPanelSlots ? kReadTwice : 1.0f);
        }
        shift_ = kWidestTile;
        float least = 0;
#pragma unroll
        for (int s = kWidestTile; s >= kNarrowestTile; --s) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2)
                costs[s - 1] += __shfl_xor_sync(kWholeWarp, costs[s - 1], step);
            if (s == kWidestTile || costs[s - 1] < least) {
                least = costs[s - 1];
                shift_ = s;
            }
        }
        const int groups = static_cast<int>(groups_.num_groups),
                  panels = (cols_ - 1) / panel_columns(shift_) + 1;
        int tail = 0;
        if (shift_ == kWidestTile)
            tail = min(panels / 2, (static_cast<int>(gridDim.x) * kNarrowTurns + groups - 1) / groups);
        wide_panels_ = panels - tail;
        wide_items_ = wide_panels_ * groups;
        narrow_panels_ =
            tail == 0 ? 0
                      : (cols_ - wide_panels_ * panel_columns(shift_) - 1) / panel_columns(shift_ - 1) + 1;
        narrow_items_ = narrow_panels_ * groups;
    }
    // Group and columns of a panel.
    __device__ Panel place(int number) const {
        const bool narrow = number >= wide_items_;
        const int index = narrow ? number - wide_items_ : number, shift = narrow ? shift_ - 1 : shift_,
                  panels = narrow ? narrow_panels_ : wide_panels_, columns = panel_columns(shift),
                  groups = static_cast<int>(groups_.num_groups);
        // side by side: of few large groups many columns, so that long pieces of rows are read
        const int side = shift_ == kWidestTile ? kPanelBlockColumns / columns : panels,
                  block = index / (groups * side), rest = index - block * groups * side,
                  here = min(side, panels - block * side), group = rest / here;
        Panel panel = {};
        panel.group = group;
        panel.shift = shift;
        panel.col = (narrow ? wide_panels_ * panel_columns(shift_) : 0) +
                    (block * side + rest - group * here) * columns;
        return panel;
    }

    const DeviceGroups& groups_;
    const int64_t extent_;
    const int lead_base_, cols_;
    int shift_;
    int wide_panels_, narrow_panels_, wide_items_, narrow_items_;
};

}  // namespace fp8flow::hopper
