"""Draw the pictures of the README."""

import torch

import train
from base import metrics
from base.common import Parser, atomic_file, new_file
from look.plots import COLOURS, headline, lines, panels, png

BOX = torch.tensor([310.0, 190.0])  # pixels from the center to the edges of the moving picture


def language_frames(rows=100):
    """Train mexma by default. Return its languages, and a list of (step, wrong translation in
    percent, embeddings (L, N, D)) of every 18th step and the last."""
    run = train.start("mexma", data="toy", eval_every=10_000, eval_limit=rows)
    frames = []
    for record in run.steps(every=18):
        if "loss" in record or record["step"] == 0:
            z = run.evaluation().embeddings
            error = metrics.retrieval(z, run.rows.texts)["xsim"]
            frames.append((record["step"], error, torch.stack(list(z.values()))))
    return list(z), frames


def in_one_view(frames, drawn=25):
    """Project each frame onto its own two principal components, turned so that points move as
    little as possible, and scaled to BOX: [(L, drawn, 2)] in pixels around 0."""
    views = []
    for _, _, z in frames:
        z = z[:, :drawn].double()
        z = z - z.mean((0, 1))
        flat = z @ torch.linalg.svd(z.flatten(0, 1), full_matrices=False).Vh[:2].T
        if views:  # [orthogonal Procrustes, Schoenemann 1966]
            u, _, v = torch.linalg.svd(flat.flatten(0, 1).T @ views[-1].flatten(0, 1))
            flat = flat @ u @ v
        views.append(flat / (flat.abs().amax((0, 1)) / BOX).max())
    return views


MARK = "<!-- made by nanoJEPA -->"
STYLE = """<style>text{font:15px system-ui,sans-serif;fill:#1b1b1b}rect{fill:#fff}
polyline{fill:none;stroke:#909090;stroke-width:.8}
path{stroke-width:10;stroke-linecap:round}
@media(prefers-color-scheme:dark){text{fill:#e6e6e6}rect{fill:#14171a}}</style>"""


def moving_svg(languages, frames, views, seconds=8):
    """Return a moving SVG of the views of `in_one_view` of frames [(step, error, _)]. It plays once
    and stays at the last frame, which is also what a still picture shows."""
    time = f'dur="{seconds}s"'  # after it, an element has its own attribute: the last value
    points = (torch.stack(views) + torch.tensor([330, 245])).round().int()  # (frames, L, N, 2)
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 450">', MARK, STYLE,
           '<rect width="660" height="450"/>']

    def moves(attribute, values):
        return f'<animate attributeName="{attribute}" values="{";".join(values)}" {time}/>'

    for sentence in points.permute(2, 0, 1, 3).tolist():  # (N, frames, L, 2)
        values = [" ".join(f"{x},{y}" for x, y in languages_of) for languages_of in sentence]
        out.append(f'<polyline points="{values[-1]}">{moves("points", values)}</polyline>')
    for number, language in enumerate(points.transpose(0, 1).tolist()):  # L of (frames, N, 2)
        # A line of length 0 with round ends is a dot.
        values = ["".join(f"M{x} {y}h0" for x, y in sentences) for sentences in language]
        out.append(f'<g stroke="{COLOURS[number]}"><path d="{values[-1]}">{moves("d", values)}'
                   f'</path><path d="M{20 + 60 * number} 20h0"/></g>'
                   f'<text x="{31 + 60 * number}" y="25">{languages[number]}</text>')
    for number, (step, error, _) in enumerate(frames):
        shown = ["visible" if number == other else "hidden" for other in range(len(frames))]
        move = moves("visibility", shown).replace("<animate", '<animate calcMode="discrete"')
        out.append(f'<text x="645" y="25" text-anchor="end" visibility="{shown[-1]}">step {step}: '
                   f"wrong translation {error:.0f} %{move}</text>")
    return "\n".join([*out, "</svg>\n"])


def translations_picture():
    """Return a moving SVG: the embeddings of sentences in five languages along training."""
    languages, frames = language_frames()
    return moving_svg(languages, frames, in_one_view(frames))


def health_picture():
    """Draw loss, RankMe and the cosine of unrelated sentences while an encoder collapses."""
    figure, axes = panels(1, 3, 2)
    logs = {}  # {label: {step: scores}}
    for label, flags in (("alignment alone", dict(mlm_weight=0.0, koleo_weight=0.0)),
                         ("all of MEXMA", {})):
        run = train.start("mexma", data="toy", steps=40, eval_every=10, **flags)  # as in README
        logs[label] = {one["step"]: one["eval"] for one in run.steps() if "eval" in one}
    for axis, (metric, name, span) in zip(axes, (
            ("validation/align", "alignment loss (held out)", ()),
            ("geometry/rankme", "RankMe", (0, run.model.config.width)),
            ("geometry/cosine/same", "cosine of unrelated\nsentences", (0, 1)))):
        lines({label: (list(log), [scores[metric] for scores in log.values()])
               for label, log in logs.items()}, "training step", name, axis=axis)
        axis.update_datalim([(0, value) for value in span], updatex=False)
        axis.autoscale_view()
        if axis is not axes[0]:
            axis.get_legend().remove()
    return headline(figure, "With the alignment loss alone an encoder collapses: the loss falls to "
                    "zero, RankMe to one, and the cosine of unrelated sentences stays at one")


PICTURES = {"translations": translations_picture, "health": health_picture}


def plot_command(words):
    parser = Parser("python -m results plot", "Draw a picture of README.md: translations.svg, "
                    "which moves, or health.png.")
    parser.add_argument("name", metavar="NAME", choices=PICTURES, help=" or ".join(PICTURES))
    name = parser.parse_args(words).name
    ending = ".svg" if name == "translations" else ".png"
    # Before the work, which can take minutes.
    out = new_file("the picture", name + ending, ending, b"nanoJEPA")
    picture = PICTURES[name]()
    with atomic_file(out) as file:
        file.write(picture.encode() if ending == ".svg" else png(picture))
    print(out)
