"""Write docs/figures.md: for every measured figure of README and docs the record that it comes from.

    python tools/bench.py figures           # after a new record, or a new figure in a page
    python tools/bench.py figures --check   # only report what is out of date; exit code 1

`FIGURES` is the list. An entry has the words of a page with gaps, and the function that fills them from the newest
record of its kind (docs/benchmarks/DATE-KIND.json): a page that says otherwise is named, with what it should say. A
record that a page links to has an entry for that page, or a block that `python tools/bench.py quote` writes; what a
sentence says of all of a record ("every", "none", "the same") is an entry's, too.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import click

from tools.benchmarks import quote, readings, step
from tools.benchmarks.contestants import TORCH
from tools.benchmarks.embeddings import DENSE_SIDE
from tools.benchmarks.readings import Content, Values
from tools.benchmarks.record import FOLDER, ROOT, table

PAGE = "docs/figures.md"
_LINK = re.compile(r"benchmarks/(\d{4}-\d\d-\d\d-([\w-]+))\.(?:md|jsonl?|svg)\b")
_OF_ALL = re.compile(r"\b(all|none|every|same|never|always)\b")
_END_OF_SENTENCE = re.compile(r"(?<=[.;:|]) ")
_GAP = re.compile(r"\{[^}]*\}")
_UP_TO_3_WORDS = r"\S+?(?: \S+?){0,2}"
_WHOLE = r"(?<!\d)(?<!\d[.,]){}(?![.,]?\d)"  # 30 is not in 130, nor in 30.5


@dataclass(frozen=True)
class Figure:
    """``words``: of ``page``, with gaps for ``str.format``; ``{name}`` and ``{date}`` are the record's."""

    page: str
    kind: str
    values: Values
    words: str


@dataclass(frozen=True)
class Source:
    """The newest record of a kind."""

    path: Path
    content: Content

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def date(self) -> str:
        return self.name[:10]

    @property
    def commit(self) -> str:
        """As docs/figures.md says it; empty for a record that does not name one."""
        content = self.content if isinstance(self.content, dict) else {}
        at = content.get("circumstances", content)
        changed = " and uncommitted changes" if at.get("uncommitted_changes") else ""
        return str(at.get("commit", ""))[:10] + changed


# fmt: off
FIGURES = (
    Figure("docs/checkpoints.md", "checkpoint", readings.checkpoint,
           "{:.0f} MB every {} steps): in the background a checkpoint takes {:.1f} % of the step time on 1 rank and "
           "{:.1f} % on 2, medians within the noise of that machine (the quartiles on 2 ranks reach from {:.0f} % to "
           "{:+.0f} %)"),
    Figure("docs/data.md", "data-pipeline", readings.nothing,
           "[The record of {date}](benchmarks/{name}.md)"),
    *(Figure("docs/control-plane.md", "control-plane", readings.barrier(case),
             f"| {where} | {{:.1f}} | {{:.1f}} | {{:.1f}} |")
      for case, where in {
          "4 x 8 at the root": "32 | to the root", "64 x 8 at the root": "512, 64 nodes | to the root",
          "64 x 8 over relays": "512, 64 nodes | through relays",
          "125 x 8 over relays": "1000, 125 nodes | through relays",
          "1250 x 8 over relays": "10,000, 1250 nodes | through relays",
      }.items()),
    Figure("docs/control-plane.md", "control-plane", readings.relays,
           "At 512 ranks relays lower the root's time from {:.1f} to {:.1f} ms"),
    Figure("docs/control-plane.md", "control-plane", readings.latencies,
           "A barrier of two ranks takes {:.2f} ms (median) and at most {:.0f} ms, "
           "1000 ranks join in {:.1f} s and 10,000 in {:.1f} s. Beside ten thousand silent connections, values of 60 "
           "MB and malformed headers the longest barrier took {:.1f} ms."),
    *(Figure("docs/how-it-works.md", "step", readings.float32_step(key),
             f"| {words} | {{:.0f}} | {{:.0f}} | {theirs} |")
      for key, words in step.FIGURES.items() for theirs in ["{:.0f}" if key in ("busy", "idle", "step") else "-"]),
    Figure("docs/how-it-works.md", "step", readings.over_torch,
           "The step takes {:.2f} ({:.2f} to {:.2f}) of PyTorch's best DDP; {:.2f} ({:.2f} to {:.2f}) before"),
    Figure("docs/how-it-works.md", "step", readings.steps_alone,
           "Alone, PyTorch computes a step in {:.0f} ms, Paddle in {:.0f}"),
    Figure("docs/how-it-works.md", "step", readings.idle_link,
           "Of the {:.0f} ms in which the link is idle, {:.0f} are the forward pass, {:.0f} the backward pass until "
           "the first large bucket is launched, and {:.0f} the rest"),
    *(Figure("docs/data.md", f"shares-{kind}", readings.shares,
             f"| [{words}](benchmarks/{{name}}.md) | {{:.2f}} ({{:.2f}} to {{:.2f}}) | {{:.2f}} | {{:.2f}} |")
      for kind, words in {"resnet18": "ResNet-18, 4 : 1", "resnet18-3": "ResNet-18, 2 : 2 : 1",
                          "bytes": "a small language model, 4 : 1",
                          "bytes-3": "a small language model, 2 : 2 : 1"}.items()),
    Figure("docs/methods.md", "next-step", readings.next_step,
           "a step takes {:.2f} ({:.2f} to {:.2f}) of one of `multi_node`, {:.2f} ({:.2f} to {:.2f}) of one of the "
           "best of PyTorch DDP's bucket sizes, and {:.2f} ({:.2f} to {:.2f}) of the larger of computing alone and "
           "the time of the busy link, which no order of sending goes below (`multi_node` {:.2f})"),
    Figure("docs/doctor.md", "doctor-clean-runs", readings.alarms,
           "[{} in {} runs](benchmarks/{name}.md) of two machines, apart from `busy`, which warned in {} of them"),
    Figure("docs/faults.md", "restart", readings.restarts,
           "[From `kill -9` to the next new step](benchmarks/{name}.md), on one machine with 2 processors: {:.2f} s "
           "with 2 ranks ({:.2f} s without spares), {:.2f} s with 4 ranks, {:.2f} s with two launchers; medians of {} "
           "kills, at least {:.0f} s apart. torchrun takes {:.2f} s with 2 ranks and {:.2f} s with 4, Ray Train {:.2f} "
           "s with 2"),
    Figure("docs/faults.md", "soak-spares", readings.soak_with_spares,
           "[{} kills and freezes](benchmarks/{name}.md) of two ranks on two nodes: the next step after {:.1f} s "
           "(median; at most {:.1f} s), and {} was lost"),
    Figure("docs/faults.md", "kills", readings.kills,
           "[{} kills](benchmarks/{name}.md): every loss, batch and end {} of the jobs without kills"),
    Figure("docs/faults.md", "soak", readings.soak,
           "[{} kills and freezes](benchmarks/{name}.md) on four ranks in two network namespaces, {} of them while a "
           "checkpoint was being written: {} of {} tensors and {} of {:,} losses differ, and {} sample was seen"),
    Figure("docs/faults.md", "soak-machines", readings.soak,
           "[{0} faults](benchmarks/{name}.md) left {2} of {3} tensors and {4} of {5:,} losses different, and {6} "
           "sample was seen. The next step came after {7:.1f} s at most"),
    Figure("docs/gpu.md", "model-of-streams", readings.choices,
           "{:,} interleavings of a profile of the catalogue stood still in {}"),
    Figure("docs/gpu.md", "model-of-streams", readings.without_choice,
           "{} of each cluster are replayed. [The record](benchmarks/{name}.md)"),
    Figure("docs/hangs.md", "recorder", readings.recorder,
           "With the profiles of the catalogue it took {:.2f} to {:.2f} % of steps of {:.0f} to {:.0f} ms; with "
           "`two_communicators` {:.1f} %, with `unfused` {:.1f} %; and {:.1f} to {:.1f} % of steps of {:.1f} to {:.1f} "
           "ms ([record](benchmarks/{name}.md)): counted"),
    Figure("docs/hangs.md", "recorder", readings.recorder_compared,
           "compared with steps without took {:.1f} % longer, the median of {} profiles"),
    Figure("docs/hangs.md", "hangs", readings.hangs,
           "[{} hangs and slow-downs](benchmarks/{name}.md)"),
    Figure("docs/hangs.md", "hangs", readings.hangs,
           "was named in {2} of them, and the right line in the {5} that have one; in {3} within 5 s of the timeout "
           "(half within {4:.1f} s)"),
    Figure("docs/hangs.md", "clean-runs", readings.clean_runs,
           "[{:,} trainings without a fault](benchmarks/{name}.md), asked for their stacks at random times: {} alarm"),
    Figure("docs/launching.md", "start", readings.nothing,
           "[From the command to the end of the first step](benchmarks/{name}.md)"),
    Figure("docs/launching.md", "sharding", readings.headers,
           "one TCP header per piece of up to 64 KiB, {:.1f} to {:.1f} % for large messages"),
    Figure("docs/memory.md", "sharding", readings.sharding,
           "the rank with most keeps {:.3f} of a ResNet-18's state, and the process took {:.0f} MB instead of {:.0f}; "
           "with `bf16` it took {:.0f}, more than without sharding. Its step took {:.2f} of one without sharding, that "
           "of a small network of large matrices {:.2f}; with `bf16` {:.2f} and {:.2f}; with `sharding_degree: 2` "
           "{:.2f} and {:.2f}. The small network took more memory, {:.0f} MB instead of {:.0f}"),
    Figure("docs/methods.md", "joint-batch-resnet18", readings.joint_batch,
           "take {:.3f} times as long as with `ranks` for [ResNet-18](benchmarks/{name}.md)"),
    Figure("docs/methods.md", "joint-batch", readings.joint_batch,
           "{:.3f} times for [a small transformer](benchmarks/{name}.md), whose step takes {:.0f} ms"),
    Figure("docs/memory.md", "embeddings", readings.rows_sent,
           "A rank touches about {:,.0f} rows and sends {:.1f} MB of DeepFM's {:.0f} MB on two ranks."),
    Figure("docs/memory.md", "embeddings", readings.row_steps(DENSE_SIDE),
           "A step takes, of one with whole tables, {:.2f} to {:.2f} with SGD and {:.2f} to {:.2f} with Adam"),
    Figure("docs/memory.md", "embeddings", readings.row_steps(f"{TORCH}:sparse"),
           "Of PyTorch's DDP with `sparse=True` it takes {:.2f} to {:.2f} with SGD; with Adam {:.1f} to {:.1f}, "
           "because PyTorch's SparseAdam leaves untouched rows alone. {} rounds"),
    Figure("docs/memory.md", "embeddings", readings.differences,
           "On four ranks a bias was off by {1} to {2} of one process's in {3} of {0} turns, {4} of them with whole "
           "tables."),
    Figure("docs/methods.md", "codec", readings.codec,
           "numpy codes and decodes in {:.1f} (`int8`) and {:.1f} (`int4`) times the processor time "
           "([record](benchmarks/{name}.md)"),
    Figure("docs/methods.md", "prediction",
           readings.trials(
               "none", "int4_compression", "int8_compression", "bf16_compression", "powersgd", "multi_node"),
           "`int4` took {:.1f} ms, `int8` {:.1f}, `bf16` {:.1f} and PowerSGD {:.1f}, `multi_node` {:.1f}."),
    Figure("docs/methods.md", "sync-batch-norm", readings.batch_norm,
           "8 images on each of 2 ranks over loopback: {:.2f} of the plain step ({:.2f} to {:.2f} in {} rounds); three "
           "convolutions with 32 images: {:.2f} ([record](benchmarks/{name}.md)"),
    Figure("docs/planning.md", "prediction", readings.errors,
           "Of the {} trials, the median error is {:.1f} % and the worst {:.0f} % ({}); {} are off by more than "
           "20 %."),
    Figure("docs/planning.md", "prediction", readings.orders,
           "The rank correlation of predicted and measured steps (Spearman's) is {:.2f} at 100 Mb/s, {:.2f} at 1 Gb/s "
           "and {:.2f} without a limit."),
    Figure("docs/planning.md", "prediction", readings.picks,
           "In {} of the {} rounds, the best of the {} profiles that `recommend` tries by default was within 1 % "
           "of the best of all."),
    Figure("docs/planning.md", "sharding", readings.headers,
           "An interface with segmentation offload, as in the lab, counts {:.1f} to {:.1f} %."),
    Figure("docs/proven.md", "soak", readings.soak,
           "{} kills and freezes of ranks with `multi_node`, {} while a checkpoint was being written"),
    Figure("docs/proven.md", "soak-local-sgd", readings.soak,
           "{} with LocalSGD"),
    Figure("docs/proven.md", "soak-machines", readings.soak,
           "{} machines lost with their disks, frozen, cut off, or with their relay killed"),
    Figure("docs/proven.md", "control-plane", readings.most_ranks,
           "What a barrier costs, up to {:,} ranks (real servers and relays, stand-ins for ranks) | "
           "[{date}](benchmarks/{name}.md)"),
    Figure("docs/proven.md", "doctor-clean-runs", readings.alarms,
           "with `--skip group`: {} in {} runs but of `busy`, which warned in {} on shared processors | "
           "[{date}](benchmarks/{name}.md)"),
    Figure("docs/proven.md", "hangs", readings.hangs,
           "{0} hangs and slow-downs, of {1} kinds, on 2 to 4 ranks: the right rank in {2}, and the right line of the "
           "script in {2} {5} that have one, {3} within 5 s | [{date}](benchmarks/{name}.md)"),
    Figure("docs/proven.md", "clean-runs", readings.clean_runs,
           "{:,} trainings without a fault, asked for stacks meanwhile: {} alarm, parameters {} to those of ranks that "
           "were not asked | [{date}](benchmarks/{name}.md)"),
    *(Figure("docs/proven.md", kind, readings.nothing, f"{words} | [{{date}}](benchmarks/{{name}}.md)")
      for kind, words in {
          "prediction": "How accurate `recommend`'s predictions are",
          "start": "From the command to the end of the first step, compared with torchrun",
          "embeddings": "Touched rows of embeddings beside whole tables, PyTorch DDP and Horovod: steps, bytes, "
                        "parameters",
          "sharding": "A sharded optimizer beside a whole one on four ranks at 1 Gb/s: steps, bytes, memory",
          "recorder": "What the flight recorder takes of a step's time",
      }.items()),
    *(Figure("docs/proven.md", kind, readings.nothing, f"[{words}](benchmarks/{{name}}.md)") for kind, words in {
        "checkpoint": "checkpoint", "data-pipeline": "data", "codec": "codec", "sync-batch-norm": "batch norm",
    }.items()),
    Figure("docs/proven.md", "model-of-streams", readings.choices,
           "in {:,} random interleavings where there is a choice"),
    Figure("docs/tests.md", "mutants", readings.mutants,
           "{} were tried, and {} noticed ({:.0f} %)"),
)
# fmt: on


def newest(folder: Path = FOLDER) -> dict[str, Source]:
    """The newest record of each kind that has an entry, without refuted ones."""
    found: dict[str, Source] = {}
    wanted = {each.kind for each in FIGURES}
    for path in sorted(folder.glob("????-??-??-*.json*"), reverse=True):
        if (kind := path.stem[11:]) in wanted and kind not in found:
            lines = path.read_text(encoding="utf-8")
            content = json.loads(lines) if path.suffix == ".json" else [*map(json.loads, lines.splitlines())]
            if not (isinstance(content, dict) and content.get("refuted")):
                found[kind] = Source(path, content)
    return found


def pages() -> dict[str, str]:
    """The text of README, README_cn and each page of docs, by its path."""
    paths = [*ROOT.glob("README*.md"), *sorted((ROOT / "docs").glob("*.md"))]
    found = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return {name: text for name, text in found.items() if name != PAGE}


def words_of(figure: Figure, source: Source) -> str:
    """What the page has to say."""
    return figure.words.format(*figure.values(source.content), name=source.name, date=source.date)


def problems(texts: Mapping[str, str], sources: Mapping[str, Source]) -> Iterator[str]:
    """One line for each figure that its page does not give as the record does, and for each record that a page links
    to without an entry, or that is not the newest."""
    for figure in FIGURES:
        if figure.kind not in sources:
            yield f"{figure.page}: no record of {figure.kind} for {figure.words!r}"
            continue
        source, text = sources[figure.kind], " ".join(texts.get(figure.page, "").split())
        words = words_of(figure, source)
        if not re.search(_WHOLE.format(re.escape(words)), text):
            there = re.search(_UP_TO_3_WORDS.join(map(re.escape, _GAP.split(figure.words))), text)
            said = f"has {there[0]!r}" if there else "does not say it"
            yield f"{figure.page}: {said}; {source.path.name} gives {words!r}"
    listed = {(each.page, each.kind) for each in FIGURES}
    for page, text in texts.items():
        in_blocks = Counter(_LINK.findall(text)) - Counter(_LINK.findall(quote.with_blocks(text, ())))
        for name, kind in dict.fromkeys(_LINK.findall(text)):
            if (name, kind) in in_blocks:
                continue
            if (page, kind) not in listed:
                yield f"{page}: links to {name}, and tools/benchmarks/figures.py has no entry for {kind} on this page"
            elif kind in sources and sources[kind].name != name:
                yield f"{page}: links to {name}; the newest record is {sources[kind].name}"
        yield from _said_of_all(page, text, sources)


def _said_of_all(page: str, text: str, sources: Mapping[str, Source]) -> Iterator[str]:
    """Sentences with a link to a record that say "all", "none", "every" or the like in words that no entry has: an
    entry's values compute them."""
    text = " ".join(quote.with_blocks(text, ()).split())
    for figure in (each for each in FIGURES if each.page == page and each.kind in sources):
        words = " ".join(words_of(figure, sources[figure.kind]).split())
        text = text.replace(words, _OF_ALL.sub("", words))
    for sentence in _END_OF_SENTENCE.split(text):
        if _LINK.search(sentence) and (found := _OF_ALL.search(sentence)):
            yield f"{page}: says {found[0]!r} of a record in words that no entry computes: {sentence[:160]!r}"


def written(sources: Mapping[str, Source]) -> str:
    """The text of docs/figures.md."""
    lines = [
        "# Figures, and their records",
        "",
        "The measured figures of README and of these pages, each with the record that it comes from.",
        "`tools/bench.py figures` writes this page from the list in `tools/benchmarks/figures.py`, and",
        "`tests/unit/test_figures.py` compares the list with the pages and with the newest record of each kind. The",
        "tables of the benchmark of strategies are written by `tools/bench.py quote`, and compared by",
        "`tests/unit/test_bench_records.py`. What tests assert themselves, such as how far parameters may be from",
        "those of one process, is not listed.",
    ]
    for page, found in groupby(sorted(FIGURES, key=lambda each: each.page), key=lambda each: each.page):
        rows = [_row(words_of(each, sources[each.kind]), sources[each.kind]) for each in found]
        lines += ["", f"## [{Path(page).name}]({Path(page).name})", "", *table(("words", "record", "commit"), rows)]
    return "\n".join([*lines, ""])


def _row(words: str, source: Source) -> tuple[str, str, str]:
    told = re.sub(r"\[([^]]*)\]\([^)]*\)?", r"\1", words).removesuffix(" (record").strip("| ").replace("|", "\\|")
    shown = f"{source.name}.md" if source.path.with_suffix(".md").exists() else source.path.name
    return told, f"[{source.name}](benchmarks/{shown})", source.commit


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 if something is out of date.")
def main(check: bool) -> None:
    sources = newest()
    found = list(problems(pages(), sources))
    if not found and (ROOT / PAGE).read_text(encoding="utf-8") != (text := written(sources)):
        if check:
            found = [f"{PAGE}: not what the records say"]
        else:
            (ROOT / PAGE).write_text(text, encoding="utf-8")
            click.echo(f"{PAGE}: written")
    for line in found:
        click.echo(line)
    if found:
        raise SystemExit(1)
