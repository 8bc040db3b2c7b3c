"""A model card: what a model is, what it was made of, and how good it is. Markdown."""

from relaygr.train.dataset import Dataset
from relaygr.train.evaluate import DIGITS, Figures
from relaygr.train.trainer import Trained

__all__ = ["card"]

_NEXT = ("hr@10", "hr@50", "hr@200", "ndcg@10")
_RANKING = {"auc": "AUC", "normalized_entropy": "normalized entropy", "calibration": "calibration"}


def card(done: Trained, dataset: Dataset, figures: Figures) -> str:
    """The whole page."""
    config, facts, recipe = done.model.config, dataset.facts, done.recipe
    parameters = sum(parameter.numel() for parameter in done.model.parameters())
    lines = [
        f"# {recipe.name}",
        "",
        recipe.about or "A model trained by `relaygr train`.",
        "",
        f"- model: {config.family}, {config.layers} layers, width {config.dim}, {config.heads} heads; "
        f"{parameters:,} parameters, of which {config.items * config.dim:,} are items' embeddings",
        f"- data: {facts.name}, {len(dataset):,} behaviours of {dataset.users:,} users, {len(dataset.catalogue):,} "
        f"items{'; **synthetic** in part' if facts.synthetic else ''}",
        f"- trained: {len(done.epochs)} epochs in {done.seconds:.0f} s, seed {done.seed}; epoch {done.best + 1} was "
        "best on the validation part",
        f"- judged: {figures.split}; {figures.targets:,} targets, scored once, on the newest {figures.length} "
        "behaviours",
        *(f"- {note}" for note in facts.notes),
        "",
        "## Figures",
        "",
    ]
    if figures.next_item is not None:
        lines += ["| next item, among all items but those read | " + " | ".join(map(str.upper, _NEXT)) + " |"]
        lines += ["|---" * (1 + len(_NEXT)) + "|", _row(f"ties: {dataset.ties}", figures.next_item)]
        if figures.next_item_other_ties is not None:
            left = int(figures.next_item_other_ties["users"])
            lines += [_row(f"ties the other way round, {left:,} users", figures.next_item_other_ties)]
        lines += [""]
    if figures.ranking is not None:
        lines += ["| ranking | " + " | ".join(_RANKING.values()) + " | positive |", "|---" * (2 + len(_RANKING)) + "|"]
        for label, own in figures.ranking.items():
            cells = [f"{own[name]:.{DIGITS}f}" for name in (*_RANKING, "positive")]
            lines += [f"| {label} | " + " | ".join(cells) + " |"]
        lines += [""]
    lines += ["## Terms", "", f"The data: {facts.licence}."]
    if facts.citation:
        lines += ["", f"Cite: {facts.citation}"]
    if dataset.licence_text:
        lines += ["", "The data's own terms are in LICENCE.txt; they bind whoever uses or passes on this model."]
    return "\n".join(lines) + "\n"


def _row(name: str, figures: dict[str, float]) -> str:
    return f"| {name} | " + " | ".join(f"{figures[key]:.{DIGITS}f}" for key in _NEXT) + " |"
