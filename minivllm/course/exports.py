"""Results in the forms that others read: Gradescope, GitHub Classroom, JUnit, and one line a student."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from minivllm.course.records import End, PartResult, Result, Status


def gradescope(results: Sequence[Result]) -> str:
    """`results.json` of a Gradescope autograder: one test for each part.

    Source: Gradescope autograder documentation, "Output format of results.json"."""
    tests = [
        {
            "name": f"{result.exercise.id}: {part.part.name}",
            "score": result.earned(part),
            "max_score": part.part.points,
            "status": "passed" if result.earned(part) else "failed",
            "output": explain(result, part),
            "visibility": "visible",
        }
        for result in results
        for part in result.parts
    ]
    notes = [f"{result.exercise.id}: {flag}" for result in results for flag in result.flags]
    tests += [{"name": "for the lecturer", "output": "\n".join(notes), "visibility": "hidden"}] if notes else []
    body = {"score": sum(result.points for result in results), "tests": tests}
    return json.dumps(body, indent=1)


def classroom(results: Sequence[Result]) -> str:
    """What a GitHub Classroom runner hands to `classroom-resources/autograding-grading-reporter`: base64 of JSON, version 1."""
    tests = [
        {
            "name": f"{result.exercise.id}: {part.part.name}",
            "status": "pass" if result.earned(part) else "fail",
            "score": result.earned(part),
            "message": explain(result, part)[:500],
        }
        for result in results
        for part in result.parts
    ]
    body = {
        "version": 1,
        "status": "pass" if all(result.full for result in results) else "fail",
        "max_score": sum(result.exercise.points for result in results),
        "tests": tests,
    }
    return base64.b64encode(json.dumps(body).encode()).decode()


def junit(results: Sequence[Result]) -> str:
    """JUnit XML: a suite for each exercise, a case for each part."""
    root = ElementTree.Element("testsuites")
    for result in results:
        suite = ElementTree.SubElement(root, "testsuite", name=result.exercise.id, tests=str(len(result.parts)))
        suite.set("failures", str(sum(not result.earned(part) for part in result.parts)))
        suite.set("time", f"{result.seconds:.2f}")
        for part in result.parts:
            seconds = sum(record.seconds for record in part.records)
            case = ElementTree.SubElement(suite, "testcase", classname=result.exercise.id, name=part.part.name)
            case.set("time", f"{seconds:.3f}")
            if not result.earned(part):
                ElementTree.SubElement(case, "failure", message=explain(result, part).split("\n")[0])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def write_csv(path: Path, classes: Mapping[str, Sequence[Result]]) -> None:
    """One line a student: points of each exercise, their sum, and what a human should look at."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        ids = [result.exercise.id for result in next(iter(classes.values()), [])]
        writer.writerow(["student", *ids, "points", "of", "notes"])
        for student, results in classes.items():
            points = [result.points for result in results]
            notes = [
                f"{r.exercise.id} {r.end}" + f": {r.reason}" * (r.end is not End.MISSING)
                for r in results
                if r.end is not End.FINISHED
            ]
            notes += [f"{r.exercise.id} {flag}" for r in results for flag in r.flags]
            total = sum(result.exercise.points for result in results)
            writer.writerow([student, *points, sum(points), total, "; ".join(notes)])


def explain(result: Result, part: PartResult) -> str:
    """Why a part earned nothing, in plain text; empty if it earned its points."""
    if result.earned(part):
        return ""
    if result.end is not End.FINISHED:
        return f"{result.end}: {result.reason}"
    if part.status in (Status.NOT_STARTED, Status.NOT_RUN):
        return str(part.status)
    record = part.worst
    lines = [record.why, f"in {record.where}" if record.where else "", record.counterexample, record.detail]
    return "\n".join(filter(None, lines))[:2000]
