"""Evaluation losses of runs as a table (CSV) and a plot (SVG), without any library.

    python3 doc/plot_runs.py OUT.csv OUT.svg NAME=RUN/metrics.jsonl …
"""
import json
import sys

WIDTH, HEIGHT, LEFT, TOP, KEY = 820, 420, 60, 20, 270
COLOURS = ["#000000", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9", "#999999"]

table, plot, runs = sys.argv[1], sys.argv[2], [a.split("=", 1) for a in sys.argv[3:]]
curves = {}
for name, path in runs:
    lines = (json.loads(line) for line in open(path))
    curves[name] = [(l["step"], l["eval_loss"], l["eval_loss_quantised"], l["eval_loss_master"]) for l in lines if "eval_loss" in l]

with open(table, "w") as out:
    print("run,step,eval_loss,eval_loss_quantised,eval_loss_master", file=out)
    for name, points in curves.items():
        for point in points:
            print(name, *point, sep=",", file=out)

steps = [p[0] for points in curves.values() for p in points]
losses = [p[1] for points in curves.values() for p in points]
low, high = min(losses) - 0.05, max(losses) + 0.05


def place(step, loss):
    x = LEFT + (step - min(steps)) / (max(steps) - min(steps)) * (WIDTH - LEFT - KEY)
    return x, TOP + (high - loss) / (high - low) * (HEIGHT - TOP - 50)


svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">']
svg.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
for i in range(6):
    loss = low + (high - low) * i / 5
    y = place(min(steps), loss)[1]
    svg.append(f'<line x1="{LEFT}" x2="{WIDTH - KEY}" y1="{y:.0f}" y2="{y:.0f}" stroke="#dddddd"/>')
    svg.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{loss:.2f}</text>')
for step in sorted(set(steps)):
    svg.append(f'<text x="{place(step, low)[0]:.0f}" y="{HEIGHT - 28}" text-anchor="middle">{step}</text>')
svg.append(f'<text x="{(WIDTH - KEY + LEFT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">optimizer step</text>')
for i, (name, points) in enumerate(curves.items()):
    colour = COLOURS[i % len(COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(p[0], p[1]) for p in points))
    svg.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    y = TOP + 16 + 18 * i
    svg.append(f'<text x="{WIDTH - KEY + 15}" y="{y}" fill="{colour}">{name}: {points[-1][1]:.3f}</text>')
svg.append("</svg>")
open(plot, "w").write("\n".join(svg) + "\n")
