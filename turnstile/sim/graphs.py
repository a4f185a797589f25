"""ComfyUI graphs: ready-made ones for tests and the demo, and the validation that they meet."""

from __future__ import annotations

from typing import Any

Graph = dict[str, Any]
OUTPUT_CLASSES = frozenset(
    {
        "SaveImage",
        "PreviewImage",
        "SimOllamaCall",
        "SimSleep",
        "SimError",
        "SimOOM",
        "SimStubborn",
        "SimSystemExit",
    }
)


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """One node, in the API's format."""
    return {"class_type": class_type, "inputs": inputs}


def image_graph(steps: int = 4, checkpoint: str = "sd.safetensors", **sampler: Any) -> Graph:
    """Load a checkpoint, sample, save.  ``sampler`` goes to the KSampler (``step_time``, …)."""
    return {
        "1": node("CheckpointLoaderSimple", ckpt_name=checkpoint),
        "2": node("KSampler", model=["1", 0], steps=steps, seed=1, **sampler),
        "3": node("SaveImage", images=["2", 0], filename_prefix="sim"),
    }


def sleep_graph(duration: float = 1.0) -> Graph:
    """Run for a while without touching the card; can be interrupted."""
    return {"1": node("SimSleep", duration=duration)}


def stubborn_graph(duration: float = 1.0) -> Graph:
    """A node that never looks whether it was interrupted."""
    return {"1": node("SimStubborn", duration=duration)}


def nested_graph(url: str, body: dict[str, Any], **inputs: Any) -> Graph:
    """An image job with a node that POSTs ``body`` to ``url`` and waits for the answer.

    Further inputs: ``count`` calls with ``pause`` seconds between, ``ignore_errors``.
    """
    graph = image_graph(steps=2)
    graph["4"] = node("SimOllamaCall", url=url, body=body, image=["2", 0], **inputs)
    return graph


def error_graph() -> Graph:
    """A node that raises."""
    return {"1": node("SimError")}


def oom_graph() -> Graph:
    """A node that runs out of memory."""
    return {"1": node("SimOOM")}


def system_exit_graph() -> Graph:
    """Wedges the worker for good."""
    return {"1": node("SimSystemExit")}


def links(entry: dict[str, Any]) -> list[str]:
    """The nodes that an entry's inputs come from."""
    return [
        value[0]
        for value in entry.get("inputs", {}).values()
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
    ]


def order(graph: Graph, outputs: list[str]) -> list[str]:
    """The nodes that the outputs need, each after what it needs itself."""
    done: list[str] = []
    seen: set[str] = set()
    stack = [(name, False) for name in reversed(outputs)]
    while stack:
        name, expanded = stack.pop()
        if expanded:
            done.append(name)
            continue
        if name in seen:
            continue
        seen.add(name)
        stack.append((name, True))
        stack.extend((needed, False) for needed in reversed(links(graph[name])))
    return done


def _error(kind: str, message: str, details: str = "", extra: Any = None) -> dict[str, Any]:
    return {"type": kind, "message": message, "details": details, "extra_info": extra or {}}


NO_PROMPT = _error("no_prompt", "No prompt provided", "No prompt provided")


class Verdict:
    """What validation found: an ``error`` for a 400, or the ``outputs`` that will run."""

    def __init__(self) -> None:
        self.error: dict[str, Any] | None = None
        self.outputs: list[str] = []
        self.node_errors: dict[str, Any] = {}


def validate(graph: Any) -> Verdict:
    """Judge a graph as ComfyUI does; raises TypeError where that answers 500.

    A node is invalid if its inputs hold a true ``sim_invalid`` or link to a node that is not there;
    an output is, if any that it needs is.  Classes whose name begins with ``Missing`` don't exist.
    """
    verdict = Verdict()
    if graph is None or isinstance(graph, (int, float)):
        raise TypeError("the graph cannot be iterated")
    wanted: list[str] = []
    for name in graph:
        entry = graph[name]
        if "class_type" not in entry:
            verdict.error = _error(
                "invalid_prompt",
                "Cannot execute because a node is missing the class_type property.",
                f"Node ID '#{name}'",
            )
            return verdict
        kind = str(entry["class_type"])
        if kind.startswith("Missing"):
            verdict.error = _error(
                "invalid_prompt",
                f"Cannot execute because node {kind} does not exist.",
                f"Node ID '#{name}'",
            )
            return verdict
        if kind in OUTPUT_CLASSES:
            wanted.append(name)
    if not wanted:
        verdict.error = _error("prompt_no_outputs", "Prompt has no outputs")
        return verdict
    for name in wanted:
        bad = _invalid_nodes(graph, name)
        for culprit in bad:
            kind = graph[culprit]["class_type"]
            details = {
                "errors": [_error("required_input_missing", "Required input is missing", kind)],
                "dependent_outputs": [],
                "class_type": kind,
            }
            verdict.node_errors.setdefault(culprit, details)["dependent_outputs"].append(name)
        if not bad:
            verdict.outputs.append(name)
    if not verdict.outputs:
        verdict.error = _error(
            "prompt_outputs_failed_validation", "Prompt outputs failed validation"
        )
    return verdict


def _invalid_nodes(graph: Graph, output: str) -> list[str]:
    bad: list[str] = []
    seen: set[str] = set()
    stack = [output]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        needed = links(graph[name])
        if graph[name].get("inputs", {}).get("sim_invalid") or any(
            source not in graph for source in needed
        ):
            bad.append(name)
        stack.extend(source for source in needed if source in graph)
    return bad
