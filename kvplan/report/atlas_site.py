"""An atlas as a folder of static pages: written model by model, and only where something changed."""

import hashlib
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Final

from kvplan.asked.form import Form
from kvplan.core import entries
from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError
from kvplan.core.files import path_text
from kvplan.core.processes import in_order
from kvplan.core.records import dataclass
from kvplan.core.units import GIB, format_gib
from kvplan.documents.explorer_grid import explorer_document
from kvplan.models import catalog, lookup
from kvplan.report import listing_text
from kvplan.report.atlas import Pair, Summary, contexts_of, pair_of, proof_text, users_text, usual_context
from kvplan.report.console import memory_rows
from kvplan.report.explorer_html import explorer_html
from kvplan.report.formats import as_json
from kvplan.report.proof import WHAT, Proof, error_text, figure, of_model, proofs, theirs_of
from kvplan.report.templates import kvplan_version, rendered_page, script_hash, source_of
from kvplan.report.text import memory_bar

MANIFEST: Final = "atlas.json"
SCHEMA: Final = "kvplan/atlas@1"
EXPLORED: Final = 8  # GPUs of an explorer, spread over those that hold the model


@dataclass(frozen=True, slots=True)
class Site:
    """What to write, and where.

    prices  dollars per GPU hour, by name
    url     address of the site, for its sitemap
    """

    folder: Path
    models: tuple[str, ...]
    gpus: tuple[str, ...]
    engines: tuple[str, ...]
    prices: Mapping[str, float]
    url: str | None


@dataclass(frozen=True, slots=True)
class Written:
    """Of one model, or of the lists: its files, how many of them changed, and what lists say of it."""

    name: str
    inputs: str
    files: tuple[str, ...]
    changed: int
    context: int
    rows: tuple[Summary, ...]


# --- all of it --------------------------------------------------------------------------------------------------------


def write(site: Site, jobs: int) -> Generator[Written, None, None]:
    """Write what is missing or differs, and yield each model as it is done, then the lists; remove pages that no longer
    belong. What was done before an interrupt is kept.
    """
    before = manifest(site.folder)
    save_manifest(site.folder, before.values())  # marks the folder as ours
    done = {name: before[name] for name in site.models if name in before and is_current(site, before[name])}
    try:
        yield from (Written(**{**fields_of(result), "changed": 0}) for result in tuple(done.values()))
        stale = [name for name in site.models if name not in done]
        for result in in_order(model_pages, site, stale, min(jobs, len(stale)), name="atlas"):
            done[result.name] = result
            yield result
        lists = list_pages(site, [done[name] for name in site.models])
    except BaseException:
        save_manifest(site.folder, (before | done).values())
        raise
    yield lists
    files = {file for result in (*done.values(), lists) for file in result.files}
    for result in before.values():
        for file in set(result.files) - files:
            (site.folder / file).unlink(missing_ok=True)
    save_manifest(site.folder, [*done.values(), lists])


def is_current(site: Site, known: Written) -> bool:
    """True if a model's pages were made from the same inputs and are all there."""
    is_same = known.inputs == inputs_of(site, known.name)
    return is_same and all((site.folder / file).is_file() for file in known.files)


def inputs_of(site: Site, model: str) -> str:
    """Hash of everything a model's pages depend on: kvplan itself, facts, GPUs and prices."""
    parts = [code_hash(), model, repr(site.gpus), repr(site.engines), repr(sorted(site.prices.items()))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def code_hash() -> str:
    """Hash of the version and of every file of the package and the catalog."""
    digest = hashlib.sha256(kvplan_version().encode())
    package = Path(__file__).resolve().parents[1]
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in [*sorted(files), entries.locate(catalog.FILE_NAME)]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def manifest(folder: Path) -> dict[str, Written]:
    """What an earlier run wrote. Refuse a folder with files that none did."""
    path = folder / MANIFEST
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            remedy = "name an empty folder, or a new one"
            raise UsageError(f"--output {path_text(folder)}", "contains files that kvplan did not write", remedy)
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        written = [
            Written(**{**row, "rows": tuple(Summary(*cells) for cells in row["rows"])}) for row in document["pages"]
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"cannot be read ({type(error).__name__})"
        raise UsageError(f"--output {path_text(path)}", problem, "remove the folder, or name another") from None
    return {result.name: result for result in written}


def fields_of(result: Written) -> dict[str, Any]:
    return {name: getattr(result, name) for name in Written.__slots__}


def save_manifest(folder: Path, results: Iterable[Written]) -> None:
    save(folder, MANIFEST, json.dumps({"schema": SCHEMA, "pages": [fields_of(result) for result in results]}) + "\n")


def save(folder: Path, name: str, content: str | bytes) -> bool:
    """Write a file unless it says the same already; True if it was written."""
    path, data = folder / name, content.encode() if isinstance(content, str) else content
    try:
        if path.is_file() and path.read_bytes() == data:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise EnvironmentProblem(path_text(path), problem, "check the disk") from error
    return True


# --- pages of a model -------------------------------------------------------------------------------------------------


def model_pages(site: Site, model: str) -> Written:
    """Every page of one model."""
    contexts = contexts_of(model, site.engines[0])
    context, files = usual_context(contexts), dict[str, str | bytes]()
    pairs = [pair_of(model, name, contexts, site.engines) for name in site.gpus]
    summaries = [pair.summary(context) for pair in pairs]
    place = f"models/{model}"
    explorer = explorer_page(site, model, [row.gpu for row in summaries if row.least], contexts)
    if explorer is not None:
        files[f"{place}/explorer.html"] = explorer
    for pair in pairs:
        files[f"{place}/{pair.gpu}.html"] = pair_page(site, pair, has_explorer=explorer is not None)
        files[f"{place}/{pair.gpu}.json.gz"] = pair.packed
    answer = listing_text.models(model)
    files[f"{place}/model.json"] = as_json(answer)
    files[f"{place}/index.html"] = model_page(site, model, context, summaries, has_explorer=explorer is not None)
    changed = sum([save(site.folder, name, content) for name, content in files.items()])
    return Written(model, inputs_of(site, model), tuple(files), changed, context, tuple(summaries))


def pair_page(site: Site, pair: Pair, *, has_explorer: bool) -> str:
    bar = None if pair.first is None else memory_bar(pair.first, pair.gpu)
    none = "No server of this pair has been logged."
    return rendered(
        "pair", f"{pair.model} on {pair.gpu}", 2, pair.answer,
        (("index.html", pair.model), (f"../../gpus/{pair.gpu}.html", pair.gpu)),
        servers=pair.engines, pair=pair, unit=pair.unit, bar=bar, models=site.models, has_explorer=has_explorer,
        tables=[users_table(pair, name) for name in pair.engines],
        components=components(pair), proof=proof_text(pair.proofs, "pair", none), rows=proof_rows(pair.proofs),
        model_proof=proof_text(of_model(pair.model), "model", "No server of this model has been logged."),
    )  # fmt: skip


def users_table(pair: Pair, engine: str) -> dict[str, Any]:
    """Users of one server by context and number of GPUs, and notes on what the cells do not say."""
    rows = [row for row in pair.rows if row.engine == engine and row.max_model_len is not None]
    splits = sorted({row.num_gpus for row in rows})
    cells: dict[int, dict[int, str]] = {}
    reasons, limits = dict[str, None](), dict[str, None]()
    for row in rows:
        is_held = row.fits and row.users
        text = users_text(row.users or 0, row.users_low, row.users_high) if is_held else "no"
        cells.setdefault(row.max_model_len or 0, {})[row.num_gpus] = text
        if not row.fits and row.reason:
            reasons[row.reason] = None
        if is_held and row.users == row.max_num_seqs:
            limits[f"{row.users:,} is the server's own limit of requests at a time"] = None
    ends = dict.fromkeys([*list(reasons)[:1], *list(reasons)[-1:]])
    notes = [f"no: {'; '.join(ends)}"] if reasons else []
    table = [(f"{context:,}", [by_gpus.get(count, "-") for count in splits]) for context, by_gpus in cells.items()]
    return {"engine": engine, "splits": splits, "rows": table, "notes": [*notes, *limits]}


def components(pair: Pair) -> list[tuple[str, str, str, str, str, str]]:
    """Rows of the memory of one GPU: name, GiB, range, how it is known and by which source."""
    if pair.first is None:
        return []
    document = pair.first
    ranges = {row["name"]: (row["low"], row["high"]) for row in document["assumptions"]}
    out: list[tuple[str, str, str, str, str, str]] = []
    for name, size in memory_rows(document["memory"]).items():
        origin = document["provenance"].get(f"memory.{name}")
        if not size or origin is None:
            continue
        low, high = ranges.get(name, (None, None))
        spread = f"{low / GIB:.2f}-{high / GIB:.2f}" if low is not None and high is not None and low != high else ""
        out.append((name, name.replace("_", " "), f"{size / GIB:.2f}", spread, origin["kind"], origin["source"]))
    return out


def proof_rows(rows: Iterable[Proof]) -> list[dict[str, Any]]:
    """Figures beside each other: what was logged, ours, and a calculator's if it published one."""
    return [
        {
            "source": row.source, "url": row.url, "what": WHAT[row.what], "model": row.model or row.name,
            "on": f"{row.num_gpus} x {row.gpu or 'GPU not named'}", "server": row.server, "logged": figure(row.logged),
            "ours": f"{figure(row.predicted)} ({error_text(row.error)})", "remark": row.remark,
            "theirs": theirs_of(row),
        }
        for row in rows
    ]  # fmt: skip


def explorer_page(site: Site, model: str, gpus: Sequence[str], contexts: Sequence[int]) -> str | None:
    """One page with sliders over some of the GPUs that hold the model; None for a model without choices."""
    step = max(1, -(-len(gpus) // EXPLORED))
    values = {
        "gpu": list(gpus[::step]), "max_model_len": [str(tokens) for tokens in contexts], "mean_tokens": "2048",
        "gpu_memory_utilization": "0.9", "engine": ",".join(site.engines), "offline": True,
    }  # fmt: skip
    try:
        document, _ = explorer_document([model], Form(values)) if gpus else (None, None)
        return None if document is None else explorer_html(document)
    except KvplanError:
        return None


def model_page(site: Site, model: str, context: int, rows: Sequence[Summary], *, has_explorer: bool) -> str:
    spec, facts = catalog.load(model), catalog.facts(model)
    fitting = sum(bool(row.alone) for row in rows)
    priced = [(site.prices[row.gpu] * row.least, row) for row in rows if row.least and row.gpu in site.prices]
    cheapest = ""
    if priced:
        dollars, row = min(priced, key=lambda offer: offer[0])
        per_user, best = min((dollars / (row.least_users or 1), row.gpu) for dollars, row in priced)
        cheapest = f"; cheapest: {row.least} x {row.gpu}, ${dollars:.2f} an hour; per user, {best} at ${per_user:.3f}"
    alone = f"one GPU of {fitting} of these {len(rows)} kinds" if fitting else "none of these GPUs alone"
    answer = f"{model} fits on {alone} at {context:,} tokens{cheapest}"
    none = "No server of this model has been logged."
    return rendered(
        "model", model, 2, answer, (), rows=[(row, price_text(site, row)) for row in rows], context=context,
        id=facts["id"],
        source=facts["source"], family=spec.model_type, has_explorer=has_explorer, has_prices=bool(site.prices),
        others=[name for name in lookup.relatives(str(facts["id"])) if name != model and name in site.models],
        proof=proof_text(of_model(model), "model", none), proofs=proof_rows(of_model(model)),
    )  # fmt: skip


def price_text(site: Site, row: Summary) -> str:
    price = site.prices.get(row.gpu)
    return "" if price is None or row.least is None else f"{price * row.least:,.2f}"


# --- lists ------------------------------------------------------------------------------------------------------------


def list_pages(site: Site, results: Sequence[Written]) -> Written:
    """The first page with its search box, a page for each GPU, the figures, the catalog's documents and the sitemap."""
    files: dict[str, str | bytes] = {"models.json": as_json(listing_text.models()), "style.css": stylesheet()}
    files["gpus.json"] = as_json(listing_text.gpus()[0])
    for name in site.gpus:
        rows = [row for result in results for row in result.rows if row.gpu == name]
        fitting = sum(row.alone is not None for row in rows)
        answer = f"One {name} holds {fitting} of these {len(rows)} models"
        files[f"gpus/{name}.json"] = as_json(listing_text.gpus(name)[0])
        files[f"gpus/{name}.html"] = rendered("gpu", name, 1, answer, (), rows=rows)
    public = proof_rows(row for row in proofs() if row.kind == "published")
    logs = proof_rows(row for row in proofs() if row.kind == "log")
    cases = {row.case for row in proofs() if row.case}
    answer = f"{len(public)} figures that others published, and {len(cases)} logged servers"
    files["figures.html"] = rendered(
        "figures", "Figures nobody here fitted", 0, answer, (), public=public, logs=logs, models=site.models
    )
    files["index.html"] = index_page(site, results)
    if site.url is not None:
        pages = [name for result in results for name in result.files] + list(files)
        files["sitemap.xml"] = sitemap(site.url, [name for name in pages if name.endswith(".html")])
    changed = sum([save(site.folder, name, content) for name, content in files.items()])
    return Written("", "", tuple(files), changed, 0, ())


def index_page(site: Site, results: Sequence[Written]) -> str:
    script = source_of("atlas.js")
    names = {"models": [[result.name, str(catalog.facts(result.name)["id"])] for result in results], "gpus": site.gpus}
    count = sum(len(result.rows) for result in results)
    answer = (
        f"{len(results)} models on {len(site.gpus)} GPUs: {count:,} pages, each with its numbers' sources and proof"
    )
    return rendered(
        "index", "kvplan atlas", 0, answer, (), script=script, script_hash=script_hash(script), results=results,
        gpus=site.gpus,
        data=json.dumps(names, separators=(",", ":")).replace("<", "\\u003c"),
    )  # fmt: skip


def rendered(kind: str, title: str, depth: int, answer: str, path: Sequence[tuple[str, str]], **values: Any) -> str:
    """A page of the atlas. depth: of its folder below the first page; path: pages above it."""
    usual = {"servers": (), "script": "", "script_hash": "", "format_gib": format_gib}
    return rendered_page(
        "atlas.html.jinja", kind=kind, title=title, root="../" * depth, answer=answer, path=path, **{**usual, **values}
    )


def stylesheet() -> str:
    return "".join(source_of(name) for name in ("page.css", "parts.css", "answer.css", "atlas.css"))


def sitemap(url: str, pages: Iterable[str]) -> str:
    base = url.rstrip("/")
    places = "".join(f"<url><loc>{escape(f'{base}/{page}')}</loc></url>\n" for page in pages)
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n'
    return f"{head}{places}</urlset>\n"
