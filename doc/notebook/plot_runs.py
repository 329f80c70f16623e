"""Evaluation losses of runs as a plot (SVG): a line a run, the mean of its seeds, in the band of the lowest and highest.

    python3 doc/notebook/plot_runs.py TABLE.csv PLOT.svg RUN…
"""
import collections
import csv
import sys

WIDTH, HEIGHT, LEFT, TOP, KEY = 820, 420, 60, 20, 250
COLORS = ["#000000", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9", "#999999"]

table, plot, wanted = sys.argv[1], sys.argv[2], sys.argv[3:]
curves = {name: collections.defaultdict(list) for name in wanted}
for row in csv.DictReader(open(table)):
    name = row["run"].rsplit("-", 1)[0]
    if name in curves:
        curves[name][int(row["step"])].append(float(row["eval_loss"]))

steps = sorted({step for points in curves.values() for step in points})
losses = [loss for points in curves.values() for values in points.values() for loss in values]
low, high = min(losses) - 0.05, max(losses) + 0.05


def place(step, loss):
    x = LEFT + (step - steps[0]) / (steps[-1] - steps[0]) * (WIDTH - LEFT - KEY)
    return x, TOP + (high - loss) / (high - low) * (HEIGHT - TOP - 50)


def path(points):
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">']
svg.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
for i in range(6):
    loss = low + (high - low) * i / 5
    y = place(steps[0], loss)[1]
    svg.append(f'<line x1="{LEFT}" x2="{WIDTH - KEY}" y1="{y:.0f}" y2="{y:.0f}" stroke="#dddddd"/>')
    svg.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{loss:.2f}</text>')
for step in steps:
    svg.append(f'<text x="{place(step, low)[0]:.0f}" y="{HEIGHT - 28}" text-anchor="middle">{step}</text>')
svg.append(f'<text x="{(WIDTH - KEY + LEFT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">optimizer step</text>')
for i, (name, points) in enumerate(curves.items()):
    color = COLORS[i % len(COLORS)]
    band = [place(s, min(points[s])) for s in sorted(points)] + [place(s, max(points[s])) for s in sorted(points, reverse=True)]
    svg.append(f'<polygon points="{path(band)}" fill="{color}" opacity="0.15"/>')
    means = {s: sum(points[s]) / len(points[s]) for s in sorted(points)}
    svg.append(f'<polyline points="{path(place(*p) for p in means.items())}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    svg.append(f'<text x="{WIDTH - KEY + 15}" y="{TOP + 16 + 18 * i}" fill="{color}">{name}: {means[max(means)]:.3f} ({len(points[max(means)])} seeds)</text>')
svg.append("</svg>")
open(plot, "w").write("\n".join(svg) + "\n")
