"""Draw recorded experiments along training, and the pictures of the README."""

import train
from common import BadInput, Parser, atomic_file, comma_list, did_you_mean
from look.plots import headline, lines, panels, pca, png

from .compare import DATA, EXPERIMENTS, read_records


def embeddings_picture():
    """Draw the embeddings of sentences in five languages before and after the default training."""
    run = train.start("mexma", data="toy", eval_every=10_000, eval_limit=25)
    figure, (before, after) = panels(1, 2, 3)
    pca(run.evaluation().embeddings, before, "before training", joined=25)
    list(run.steps())
    pca(run.evaluation().embeddings, after, f"after {run.train.steps} steps", joined=25)
    return headline(figure, "25 sentences in five languages: training brings the translations of a "
                    "sentence, joined by a line, together")


def health_picture():
    """Draw loss, RankMe and the cosine of unrelated sentences while an encoder collapses."""
    figure, axes = panels(1, 3, 2)
    logs = {}
    for label, flags in (("alignment alone", dict(mlm_weight=0.0, koleo_weight=0.0)),
                         ("all of MEXMA", {})):
        run = train.start("mexma", data="toy", steps=150, eval_every=15, eval_limit=200, **flags)
        logs[label] = {record["step"]: record["eval"] for record in run.steps() if "eval" in record}
    for axis, (metric, name) in zip(axes, (
            ("validation/align", "alignment loss (held out)"), ("geometry/rankme", "RankMe"),
            ("geometry/cosine/same", "cosine of unrelated\nsentences"))):
        lines({label: (list(log), [scores[metric] for scores in log.values()])
               for label, log in logs.items()}, "training step", name, axis=axis)
        if axis is not axes[0]:
            axis.get_legend().remove()
    return headline(figure, "With the alignment loss alone an encoder collapses: the loss falls to "
                    "zero, RankMe to one, and the cosine of unrelated sentences rises to one")


PICTURES = {"embeddings": embeddings_picture, "health": health_picture}


def experiment_picture(name, metric, labels=(), flops=False):
    """Draw a metric of recorded runs along training, against steps or compute."""
    series = {}
    records = read_records(name)
    if not records:
        known = [*PICTURES, *EXPERIMENTS]
        raise BadInput(f"there is no picture or experiment {name!r}{did_you_mean(name, known)}")
    for label in labels or ():
        if label not in {record["label"] for record in records}:
            raise BadInput(f"{name} has no row {label!r} (see python -m results show {name})")
    for record in records:
        scale = record["flops"] / record["steps"] / 1e12 if flops else 1
        points = {int(step) * scale: one[metric] for step, one in record.get("curve", {}).items()
                  if metric in one}
        if points and record["label"] in (labels or [record["label"]]):
            positions, values = series.setdefault(record["label"], (list(points), []))
            values.append(list(points.values())[:len(positions)])
    if not series:
        raise BadInput(f"{name} has no {metric} along training (see python -m results show)")
    axis, = panels(height=2.8)[1]
    axis.figure.set_figwidth(5.4)
    y = {name: heading for heading, name in DATA["columns"].items()}.get(metric, metric)
    return lines(series, "compute, TFLOP" if flops else "training step", y, axis=axis,
                 title=f"{name}: {y} along training (mean and range over seeds)")


def plot_command(words):
    parser = Parser("python -m results plot", "Draw a recorded experiment along training, or one "
                    f"of the README's pictures: {', '.join(PICTURES)}. Writes NAME.png.")
    parser.add_argument("name", metavar="NAME", help="an experiment, or a picture")
    parser.add_argument("--metric", default="retrieval/xsim", help="metric of an experiment "
                        "[retrieval/xsim]")
    parser.add_argument("--rows", type=comma_list, help="rows of an experiment, comma-separated "
                        "[all]")
    parser.add_argument("--flops", action="store_true", help="draw against FLOPs, not steps")
    options = parser.parse_args(words)
    figure = PICTURES[options.name]() if options.name in PICTURES else experiment_picture(
        options.name, options.metric, options.rows, options.flops)
    out = f"{options.name}.png"
    with atomic_file(out) as file:
        file.write(png(figure))
    print(out)
