"""A judged policy as JUnit XML: a target is a test suite, a rule a test case."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvplan.core.files import printable
from kvplan.policy.result import CheckFailure, CheckResult, Finding, TargetResult

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element


def junit_xml(result: CheckResult) -> str:
    """Render the XML. A warning passes, with its text as the case's output; times are not measured, so all are 0."""
    from xml.etree import ElementTree

    root = ElementTree.Element("testsuites", {"name": "kvplan check", **_counts(result.findings)})
    for target in result.targets:
        root.append(_suite(target, result.path))
    return _document(root)


def failure_xml(failure: CheckFailure) -> str:
    """Render a check that could not run: one suite with one case in error."""
    from xml.etree.ElementTree import Element, SubElement

    counts = {"tests": "1", "failures": "0", "errors": "1", "skipped": "0", "time": "0"}
    path = _text(failure.path)
    root = Element("testsuites", {"name": "kvplan check", **counts})
    suite = SubElement(root, "testsuite", {"name": path, **counts})
    case = SubElement(suite, "testcase", classname=path, name="policy", time="0")
    error = SubElement(case, "error", message=_text(failure.message), type=f"exit code {failure.exit_code}")
    error.text = _text("\n".join(map(str, failure.all)))
    return _document(root)


def _document(root: "Element") -> str:
    from xml.etree import ElementTree

    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _counts(findings: Sequence[Finding]) -> dict[str, str]:
    def count(outcome: str) -> str:
        return str(sum(finding.outcome == outcome for finding in findings))

    counts = {"tests": str(len(findings)), "failures": count("fail"), "errors": "0", "skipped": count("skip")}
    return {**counts, "time": "0"}


def _suite(target: TargetResult, path: str) -> "Element":
    from xml.etree.ElementTree import Element

    suite = Element("testsuite", {"name": _text(target.target), **_counts(target.findings)})
    seen: Counter[str] = Counter()
    for finding in target.findings:
        seen[finding.name] += 1
        suite.append(_case(finding, path, seen[finding.name]))
    return suite


def _case(finding: Finding, path: str, nth: int) -> "Element":
    """A test case; the n-th finding of a name gets a distinct name, because readers merge cases of the same name."""
    from xml.etree.ElementTree import Element, SubElement

    name = _text(f"{finding.code} {finding.name}" + (f" #{nth}" if nth > 1 else ""))
    case = Element("testcase", classname=_text(finding.target), name=name, time="0")
    match finding.outcome:
        case "fail":
            failure = SubElement(case, "failure", message=_text(finding.message), type=finding.code)
            failure.text = _said(finding, path)
        case "skip":
            SubElement(case, "skipped", message=_text(finding.message))
        case "warn" | "note":
            SubElement(case, "system-out").text = _said(finding, path)
        case "pass":
            pass
    return case


def _said(finding: Finding, path: str) -> str:
    lines = [f"{path}:{finding.line}:{finding.column}: {finding.outcome}: {finding.message}"]
    if finding.fix is not None:
        lines.append(finding.fix)
    if finding.waiver is not None:
        lines.append(f"waived: {finding.waiver}")
    return "\n".join(map(_text, lines))


def _text(untrusted: str) -> str:
    """One line without characters invalid in XML 1.0 even if escaped: control characters, lone surrogates, U+FFFE."""
    return printable(untrusted, 4000)
