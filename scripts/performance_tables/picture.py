# SPDX-License-Identifier: MIT
"""The picture docs/pictures/deepseek_v3_layer.svg."""
from performance_tables.layers import STAGES
from performance_tables.common import RECIPES, ROOT, layer_ms, load, recipe_of, stage_ms

PICTURE = ROOT / "docs" / "pictures" / "deepseek_v3_layer.svg"
GROUPS = [  # label, stages, colour: readable on white and on near-black
    ("dispatch, combine", ["dispatch", "combine"], "#d9703a"),
    ("fc1, fc2 forward", ["fc1", "fc2"], "#3b6fb6"),
    ("fc1, fc2 dgrad", ["fc1 dgrad", "fc2 dgrad"], "#4fa3b8"),
    ("fc1, fc2 wgrad", ["fc1 wgrad", "fc2 wgrad"], "#3f9a75"),
    ("shared expert", ["shared expert"], "#8c62aa"),
    ("swiglu", ["swiglu"], "#c2992b"),
    ("cast", ["cast"], "#c23b4e"),
    ("transpose", ["transpose"], "#6f7d2c"),
    ("norm, route, plan, rest", ["norm", "route", "plan", "moe layer"], "#8a93a0"),
]


def picture():
    profile = load(STAGES)
    width, left, right, bar, gap, top = 960, 150, 110, 46, 22, 128
    scale = (width - left - right) / max(sum(stage_ms(recipe_of(profile, r)).values()) for r in RECIPES)
    height = top + len(RECIPES) * (bar + gap) + 44
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
           f'font-family="DejaVu Sans, Arial, sans-serif">',
           "<title>Time of the DeepSeek-V3 MoE layer on four H200s by recipe and stage</title>",
           "<style>.t{fill:#1f2937}.s{fill:#4b5563}@media (prefers-color-scheme: dark){.t{fill:#e5e7eb}.s{fill:#b6bec9}}</style>",
           '<text x="24" y="34" class="t" font-size="18" font-weight="bold">DeepSeek-V3 MoE layer, forward + backward, ms</text>',
           f'<text x="24" y="56" class="s" font-size="12.5">4 x {profile["machine"]["device"]}, 256 experts, top-8, 4096 tokens per GPU, balanced '
           f'routing; medians of {profile["steps"]} steps, commit {profile["commit"]}</text>']
    x, y = 24, 82
    for label, _, colour in GROUPS:
        step = 24 + 7.4 * len(label) + 12
        if x + step > width - 16:
            x, y = 24, y + 20
        out.append(f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 17:.0f}" y="{y}" class="s" font-size="12">{label}</text>')
        x += step
    for i, name in enumerate(RECIPES):
        recipe = recipe_of(profile, name)
        stages = stage_ms(recipe)
        y = top + i * (bar + gap)
        out.append(f'<text x="{left - 12}" y="{y + bar / 2 + 5:.0f}" class="t" font-size="14" text-anchor="end">{name}</text>')
        x = float(left)
        for label, members, colour in GROUPS:
            ms = sum(v for (stage, _), v in stages.items() if stage in members)
            if ms == 0:
                continue
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{ms * scale:.1f}" height="{bar}" fill="{colour}"><title>{label}: {ms:.2f} ms</title></rect>')
            if ms * scale > 34:
                out.append(f'<text x="{x + ms * scale / 2:.1f}" y="{y + bar / 2 + 4:.0f}" fill="#ffffff" font-size="12" '
                           f'text-anchor="middle">{ms:.2f}</text>')
            x += ms * scale
        out.append(f'<text x="{x + 10:.1f}" y="{y + bar / 2 + 6:.0f}" class="t" font-size="17" font-weight="bold">{layer_ms(recipe):.2f} ms</text>')
    out.append(f'<text x="24" y="{height - 18}" class="s" font-size="12">Bars: medians of the stages under the stage timer. Bold: end to end, '
               'measured in a second pass without it.</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"
