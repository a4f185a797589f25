"""What the well-known clients send, through a whole turnstile.

Where the client is a Python package the client itself is used; the others' requests are written down here as they can
be seen on the wire, in words of our own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import ollama
import openai
import pytest_twisted
import websockets.sync.client
from system_kit import System, in_loop, in_thread, pieces, running, until

from turnstile.sim.graphs import image_graph, sleep_graph

MODEL = "llama3.2"
QUESTION = [{"role": "user", "content": "why is the sky blue?"}]
EMBEDDER = "nomic-embed-text"


# -- ollama's own client


@pytest_twisted.ensureDeferred
async def test_ollama_python_client_of_blocking_code(tmp_path: Path) -> None:
    async with running() as s:

        def use() -> None:
            client = ollama.Client(host=s.url())
            answer = client.chat(MODEL, QUESTION, options={"num_predict": 5})
            assert answer.done and answer.message.content
            parts = list(client.chat(MODEL, QUESTION, stream=True, options={"num_predict": 5}))
            assert len(parts) == 6 and parts[-1].done
            assert client.generate(MODEL, "why?", options={"num_predict": 3}).response
            words = list(client.generate(MODEL, "why?", stream=True, options={"num_predict": 3}))
            assert len(words) == 4
            assert len(client.embed(EMBEDDER, ["a", "b"]).embeddings) == 2
            assert client.embeddings(EMBEDDER, "a").embedding
            assert {model.model for model in client.list().models} >= {"llama3.2:latest"}
            assert any(m.model == "llama3.2:latest" for m in client.ps().models)
            assert client.show(MODEL).details is not None
            assert client.pull(MODEL).status == "success"
            assert [part.status for part in client.pull(MODEL, stream=True)][-1] == "success"
            client.copy(MODEL, "mine")
            client.delete("mine")
            weights = tmp_path / "weights.gguf"
            weights.write_bytes(bytes(300_000))
            digest = client.create_blob(weights)
            assert digest == "sha256:" + hashlib.sha256(bytes(300_000)).hexdigest()
            made = client.create("mine", from_=MODEL, files={"weights.gguf": digest})
            assert made.status == "success"
            # What `ollama stop` sends.
            client.generate(MODEL, keep_alive=0)
            client._client.close()

        await in_thread(use)
        assert len(s.host.ollama.blobs) == 1


@pytest_twisted.ensureDeferred
async def test_ollama_python_client_of_asyncio() -> None:
    async with running() as s:

        async def use() -> None:
            client = ollama.AsyncClient(host=s.url())
            answer = await client.chat(MODEL, QUESTION, options={"num_predict": 5})
            assert answer.message.content
            stream = await client.chat(MODEL, QUESTION, stream=True, options={"num_predict": 5})
            assert len([part async for part in stream]) == 6
            many = [client.generate(MODEL, "x", options={"num_predict": 3}) for _ in range(8)]
            assert all(one.done for one in await asyncio.gather(*many))
            # One that is given up in the middle.
            stream = await client.chat(MODEL, QUESTION, stream=True, options={"num_predict": 9999})
            async for _ in stream:
                break
            await stream.aclose()
            await client._client.aclose()

        await in_loop(use)
        await until(lambda: s.host.ollama.active_generations == 0)


@pytest_twisted.ensureDeferred
async def test_ollama_python_client_reads_turnstiles_own_errors() -> None:
    async with running(llm_busy_mode="reject") as s:
        await s.queue(sleep_graph(10_000))

        def use() -> None:
            try:
                ollama.Client(host=s.url()).chat(MODEL, QUESTION)
            except ollama.ResponseError as error:
                assert error.status_code == 503
                assert "GPU is busy" in error.error
            else:
                raise AssertionError("no error")

        await in_thread(use)
        await s.request("POST", "/interrupt", {}, "comfyui")


@pytest_twisted.ensureDeferred
async def test_ollama_cli_probes_and_chats() -> None:
    # `ollama run`: HEAD /, /api/show, an empty generate that loads, a streamed chat.
    async with running() as s:
        agent = {"User-Agent": "ollama/0.31.0 (amd64 linux) Go/go1.24"}
        assert (await s.request("HEAD", "/", headers=agent)).status == 200
        shown = await s.request("POST", "/api/show", {"model": MODEL}, headers=agent)
        assert shown.status == 200
        load = await s.request("POST", "/api/generate", {"model": MODEL, "prompt": ""})
        assert load.lines()[-1]["done_reason"] == "load"
        chat = await s.chat(4, options={"num_predict": 4}, format="", keep_alive=300)
        assert len(chat.lines()) == 5
        assert chat.headers["content-type"].startswith("application/x-ndjson")


# -- openai's own client


@pytest_twisted.ensureDeferred
async def test_openai_python_client_of_blocking_code() -> None:
    async with running() as s:

        def use() -> None:
            with openai.OpenAI(base_url=s.url() + "/v1", api_key="ollama", max_retries=0) as client:
                whole = client.chat.completions.create(
                    model=MODEL,
                    messages=QUESTION,
                    max_tokens=5,  # type: ignore[arg-type]
                )
                assert whole.choices[0].message.content
                stream = client.chat.completions.create(
                    model=MODEL,
                    messages=QUESTION,
                    max_tokens=5,
                    stream=True,  # type: ignore[arg-type]
                )
                words = [c.choices[0].delta.content for c in stream if c.choices]
                assert len([word for word in words if word]) == 5
                text = client.completions.create(model=MODEL, prompt="why", max_tokens=3)
                assert text.choices[0].text
                vectors = client.embeddings.create(model=EMBEDDER, input=["a", "b"])
                assert len(vectors.data) == 2
                answer = client.responses.create(model=MODEL, input="why", max_output_tokens=3)
                assert answer.output_text
                assert "llama3.2:latest" in [model.id for model in client.models.list()]

        await in_thread(use)
        assert s.arbiter.llm_inflight == 0


@pytest_twisted.ensureDeferred
async def test_openai_python_client_of_asyncio_in_parallel() -> None:
    async with running() as s:

        async def use() -> None:
            client = openai.AsyncOpenAI(base_url=s.url() + "/v1", api_key="x", max_retries=0)

            async def one() -> int:
                stream = await client.chat.completions.create(
                    model=MODEL,
                    messages=QUESTION,
                    max_tokens=5,
                    stream=True,  # type: ignore[arg-type]
                )
                return len([chunk async for chunk in stream])

            assert min(await asyncio.gather(*[one() for _ in range(10)])) >= 5
            await client.close()

        await in_loop(use)


@pytest_twisted.ensureDeferred
async def test_openai_python_client_comes_again_after_retry_after() -> None:
    async with running(llm_busy_mode="reject", llm_busy_status=429, busy_retry_after=1) as s:
        await s.queue(sleep_graph(10))

        def use() -> Any:
            with openai.OpenAI(base_url=s.url() + "/v1", api_key="x", max_retries=0) as client:
                try:
                    client.chat.completions.create(model=MODEL, messages=QUESTION)  # type: ignore[arg-type]
                except openai.RateLimitError as error:
                    assert error.response.headers["retry-after"] == "1"
                    assert error.type == "rate_limit_error"
                else:
                    raise AssertionError("no error")
            with openai.OpenAI(base_url=s.url() + "/v1", api_key="x", max_retries=2) as client:
                return client.chat.completions.create(
                    model=MODEL,
                    messages=QUESTION,
                    max_tokens=2,  # type: ignore[arg-type]
                )

        answer = await in_thread(use)
        assert answer.choices[0].message.content


# -- routers and front ends in front of Ollama


@pytest_twisted.ensureDeferred
async def test_litellm_ollama_provider() -> None:
    async with running() as s:
        headers = {"User-Agent": "litellm/1.80.0", "Content-Type": "application/json"}
        # ollama_chat/...: /api/chat with flattened options; ollama/...: /api/generate with a prompt made by LiteLLM.
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": QUESTION,
            "options": {"num_predict": 4, "temperature": 0.2},
            "stream": False,
        }
        answer = await s.request("POST", "/api/chat", body, headers=headers)
        assert answer.json()["done"] is True
        streamed = await s.request("POST", "/api/chat", {**body, "stream": True}, headers=headers)
        assert len(streamed.lines()) == 5
        body = {
            "model": MODEL,
            "prompt": "### User:\nwhy?\n\n",
            "options": {"num_predict": 4},
            "stream": True,
            "images": [],
        }
        generated = await s.request("POST", "/api/generate", body, headers=headers)
        assert len(generated.lines()) == 5
        body = {"model": EMBEDDER, "input": ["a"], "options": {}}
        assert (await s.request("POST", "/api/embed", body, headers=headers)).status == 200
        # It asks what a model can do before it uses tools.
        assert (await s.request("POST", "/api/show", {"name": MODEL})).status in (200, 400)


@pytest_twisted.ensureDeferred
async def test_litellm_openai_provider() -> None:
    async with running() as s:
        headers = {"Authorization": "Bearer none", "User-Agent": "OpenAI/Python 1.99"}
        body = {
            "model": MODEL,
            "messages": QUESTION,
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await s.request("POST", "/v1/chat/completions", body, headers=headers)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        events = list(pieces(answer.body))
        assert events[-1] == b"[DONE]"
        assert all(json.loads(event) for event in events[:-1])


@pytest_twisted.ensureDeferred
async def test_n8n_ollama_nodes() -> None:
    async with running() as s:
        # The credentials' check, the list of models, then LangChain's client: NDJSON over fetch.
        assert (await s.request("GET", "/")).body == b"Ollama is running"
        tags = await s.request("GET", "/api/tags", headers={"Accept": "application/json"})
        assert MODEL + ":latest" in [model["name"] for model in tags.json()["models"]]
        headers = {
            "Accept": "application/json",
            "Accept-Language": "*",
            "Sec-Fetch-Mode": "cors",
            "User-Agent": "node",
        }
        body = {
            "model": MODEL,
            "messages": QUESTION,
            "stream": True,
            "keep_alive": "5m",
            "options": {"num_predict": 4, "num_gpu": -1},
        }
        chat = await s.request("POST", "/api/chat", body, headers=headers)
        assert chat.lines()[-1]["done"] is True


@pytest_twisted.ensureDeferred
async def test_n8n_openai_nodes() -> None:
    async with running() as s:
        headers = {"Authorization": "Bearer x", "User-Agent": "OpenAI/JS 5.12", "Accept": "*/*"}
        models = await s.request("GET", "/v1/models", headers=headers)
        assert models.json()["data"]
        body = {"model": MODEL, "messages": QUESTION, "stream": False, "n": 1, "max_tokens": 4}
        answer = await s.request("POST", "/v1/chat/completions", body, headers=headers)
        assert answer.json()["choices"][0]["message"]["content"]
        body = {"model": MODEL, "input": [{"role": "user", "content": "x"}], "stream": False}
        answer = await s.request("POST", "/v1/responses", body, headers=headers)
        assert answer.status == 200
        body = {"model": EMBEDDER, "input": ["a"], "encoding_format": "float"}
        assert (await s.request("POST", "/v1/embeddings", body, headers=headers)).status == 200


@pytest_twisted.ensureDeferred
async def test_open_webui_ollama_proxy() -> None:
    # aiohttp, chunked answers read line by line, the caller's identity in headers of its own.
    async with running() as s:

        async def use() -> list[Any]:
            headers = {
                "X-OpenWebUI-User-Name": "Zo%C3%AB",
                "X-OpenWebUI-User-Email": "z@example.org",
            }
            async with aiohttp.ClientSession(trust_env=True, headers=headers) as session:
                async with session.get(s.url() + "/api/version") as answer:
                    assert (await answer.json())["version"]
                async with session.get(s.url() + "/api/tags") as answer:
                    assert (await answer.json())["models"]
                async with session.get(s.url() + "/api/ps") as answer:
                    assert "models" in await answer.json()
                body = {"model": MODEL, "messages": QUESTION, "options": {"num_predict": 6}}
                async with session.post(
                    s.url() + "/api/chat",
                    data=json.dumps(body),
                    headers={"Content-Type": "application/json"},
                ) as answer:
                    return [json.loads(line) async for line in answer.content]

        lines = await in_loop(use)
        assert len(lines) == 7 and lines[-1]["done"]
        record = s.host.ollama.requests_for("POST", "/api/chat")[0]
        assert record.header(b"x-openwebui-user-name") == b"Zo%C3%AB"


# -- ComfyUI


@pytest_twisted.ensureDeferred
async def test_open_webui_image_engine() -> None:
    # A socket with a clientId, POST /prompt, wait for executing with node null, then history and view.
    async with running() as s:

        def use() -> bytes:
            base, client_id = s.url("comfyui"), str(uuid.uuid4())
            address = base.replace("http", "ws") + f"/ws?clientId={client_id}"
            with websockets.sync.client.connect(address, max_size=None) as ws:
                body = {"prompt": image_graph(steps=6), "client_id": client_id}
                prompt_id = _post(base + "/prompt", body)["prompt_id"]
                while True:
                    message = ws.recv(timeout=10)
                    if isinstance(message, bytes):
                        continue
                    event = json.loads(message)
                    data = event["data"]
                    if event["type"] == "executing" and data["node"] is None:
                        if data["prompt_id"] == prompt_id:
                            break
            history = _get_json(f"{base}/history/{prompt_id}")[prompt_id]
            images = [image for out in history["outputs"].values() for image in out["images"]]
            query = urllib.parse.urlencode(
                {key: images[0][key] for key in ("filename", "subfolder", "type")}
            )
            return _get(f"{base}/view?{query}")

        chat = s.chat(40)
        await until(lambda: s.host.ollama.active_generations)
        image = await in_thread(use)
        assert image.startswith(b"\x89PNG")
        assert (await chat).status == 200
        await until(lambda: not s.service.sites["comfyui"].relays)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        data: bytes = answer.read()
        return data


def _get_json(url: str) -> Any:
    return json.loads(_get(url))


def _post(url: str, body: Any, **headers: str) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read() or b"null")


@pytest_twisted.ensureDeferred
async def test_comfyui_page() -> None:
    # The page is served by turnstile's port and talks to it under /api, with Host and Origin of that port.
    async with running() as s:
        events: list[str] = []

        async def use() -> None:
            base = s.url("comfyui")
            headers = {
                "Origin": base,
                "Referer": base + "/",
                "Comfy-User": "",
                "Sec-Fetch-Site": "same-origin",
                "Sec-Fetch-Mode": "cors",
            }
            client_id = uuid.uuid4().hex
            async with aiohttp.ClientSession(base, headers=headers) as page:
                for path in ("/", "/api/object_info", "/api/settings", "/api/features"):
                    async with page.get(path) as answer:
                        assert answer.status == 200, path
                async with page.ws_connect(f"/api/ws?clientId={client_id}", compress=15) as ws:
                    assert json.loads((await ws.receive()).data)["type"] == "status"
                    await ws.send_str(json.dumps({"type": "feature_flags", "data": {}}))
                    flags = json.loads((await ws.receive()).data)
                    assert flags["type"] == "feature_flags"
                    body = {
                        "client_id": client_id,
                        "prompt": image_graph(steps=5),
                        "extra_data": {"extra_pnginfo": {"workflow": {"nodes": []}}},
                    }
                    async with page.post("/api/prompt", json=body) as answer:
                        assert answer.status == 200
                        prompt_id = (await answer.json())["prompt_id"]
                    async with page.get("/api/queue") as answer:
                        queue = await answer.json()
                        assert set(queue) == {"queue_running", "queue_pending"}
                    while True:
                        message = await ws.receive(timeout=10)
                        if message.type is aiohttp.WSMsgType.BINARY:
                            events.append("preview")
                            continue
                        event = json.loads(message.data)
                        events.append(event["type"])
                        if event["type"] == "executing" and event["data"]["node"] is None:
                            break
                async with page.get("/api/history?max_items=64") as answer:
                    assert prompt_id in await answer.json()
                saved = "/api/userdata/workflows%2Fmy%20first.json"
                url = aiohttp.client.URL(base + saved, encoded=True)
                async with page.post(url.with_query("overwrite=true"), data=b"{}") as answer:
                    assert answer.status == 200
                async with page.get(url) as answer:
                    assert await answer.read() == b"{}"
                form = aiohttp.FormData()
                form.add_field("image", bytes(2_000_000), filename="in.png")
                form.add_field("overwrite", "true")
                async with page.post("/api/upload/image", data=form) as answer:
                    assert (await answer.json())["name"] == "in.png"
                async with page.get("/api/view?filename=in.png&type=input") as answer:
                    assert len(await answer.read()) == 2_000_000
                async with page.post("/api/interrupt") as answer:
                    assert answer.status == 200
                async with page.post("/api/queue", json={"clear": True}) as answer:
                    assert answer.status == 200

        await in_loop(use)
        assert {"execution_start", "progress", "executed", "preview"} <= set(events)
        assert s.host.comfy.userdata["workflows/my first.json"] == b"{}"
        targets = [record.target for record in s.host.comfy.requests]
        assert b"/api/userdata/workflows%2Fmy%20first.json" in targets
        for record in s.host.comfy.requests_for("POST", "/api/prompt"):
            assert record.header(b"host") == b"127.0.0.1:%d" % s.port("comfyui")


@pytest_twisted.ensureDeferred
async def test_comfyui_page_of_another_site_is_refused() -> None:
    async with running() as s:

        def use() -> None:
            base = s.url("comfyui")
            headers = {
                "Origin": "https://evil.example",
                "Sec-Fetch-Site": "cross-site",
                "Content-Type": "text/plain",
            }
            for path in ("/prompt", "/api/prompt", "/api/queue", "/api/free"):
                try:
                    _post(base + path, {"prompt": image_graph()}, **headers)
                except urllib.error.HTTPError as error:
                    assert error.code == 403
                    error.close()
                else:
                    raise AssertionError("not refused")
            try:
                websockets.sync.client.connect(
                    base.replace("http", "ws") + "/ws", origin="https://evil.example"
                )
            except websockets.exceptions.InvalidStatus as refused:
                assert refused.response.status_code == 403
            else:
                raise AssertionError("not refused")

        await in_thread(use)
        await s.idle()
        assert s.host.comfy.jobs == {}


@pytest_twisted.ensureDeferred
async def test_comfyui_api_client_with_websockets_and_urllib() -> None:
    # The shape of the examples that ComfyUI ships: two jobs one after the other over one socket.
    async with running() as s:

        def use() -> int:
            base, client_id = s.url("comfyui"), uuid.uuid4().hex
            address = base.replace("http", "ws") + f"/ws?clientId={client_id}"
            previews = 0
            with websockets.sync.client.connect(address) as ws:
                for _ in range(2):
                    body = {"prompt": image_graph(steps=3), "client_id": client_id}
                    prompt_id = _post(base + "/prompt", body)["prompt_id"]
                    while True:
                        message = ws.recv(timeout=10)
                        if isinstance(message, bytes):
                            previews += 1
                            continue
                        event = json.loads(message)
                        if event["type"] == "executing" and event["data"]["node"] is None:
                            assert event["data"]["prompt_id"] == prompt_id
                            break
                    assert _get_json(f"{base}/history/{prompt_id}")[prompt_id]["outputs"]
            return previews

        assert await in_thread(use) > 0


@pytest_twisted.ensureDeferred
async def test_comfyui_api_client_with_aiohttp_many_at_once() -> None:
    async with running() as s:

        async def one(session: aiohttp.ClientSession) -> bool:
            client_id = uuid.uuid4().hex
            async with session.ws_connect(f"/ws?clientId={client_id}") as ws:
                body = {"prompt": image_graph(steps=2), "client_id": client_id}
                async with session.post("/prompt", json=body) as answer:
                    prompt_id = (await answer.json())["prompt_id"]
                async for message in ws:
                    if message.type is aiohttp.WSMsgType.TEXT:
                        event = json.loads(message.data)
                        if event["type"] == "execution_success":
                            return bool(event["data"]["prompt_id"] == prompt_id)
            return False

        async def use() -> list[bool]:
            async with aiohttp.ClientSession(s.url("comfyui")) as session:
                return await asyncio.gather(*[one(session) for _ in range(6)])

        chat = s.chat(20)
        assert await in_loop(use) == [True] * 6
        assert (await chat).status == 200


# -- curl


@pytest_twisted.ensureDeferred
async def test_curl_shows_the_first_token_before_the_last() -> None:
    async with running(speed=5.0) as s:

        def use(path: str, body: dict[str, Any]) -> tuple[list[float], bytes]:
            command = ["curl", "-sN", s.url() + path, "-d", json.dumps(body)]
            times, output = [], b""
            with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as curl:
                assert curl.stdout is not None
                while piece := curl.stdout.read(65536):
                    times.append(time.monotonic())
                    output += piece
            assert curl.returncode == 0
            return times, output

        body: dict[str, Any] = {"model": MODEL, "messages": QUESTION}
        native = {**body, "options": {"num_predict": 60}}
        times, output = await in_thread(use, "/api/chat", native)
        assert len(output.splitlines()) == 61
        assert len(times) > 10 and times[-1] - times[0] > 0.1
        times, output = await in_thread(
            use, "/v1/chat/completions", {**body, "max_tokens": 60, "stream": True}
        )
        assert output.rstrip().endswith(b"data: [DONE]")
        assert len(times) > 10 and times[-1] - times[0] > 0.1


@pytest_twisted.ensureDeferred
async def test_curl_uploads_with_expect_100_continue() -> None:
    async with running() as s:
        data = bytes(3_000_000)
        digest = hashlib.sha256(data).hexdigest()

        def use(s: System) -> tuple[int, bytes]:
            command = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-X", "POST"]
            command += ["-H", "Expect: 100-continue", "--data-binary", "@-"]
            done = subprocess.run(
                [*command, f"{s.url()}/api/blobs/sha256:{digest}"],
                input=data,
                capture_output=True,
                timeout=20,
            )
            return done.returncode, done.stdout

        assert await in_thread(use, s) == (0, b"201")
        (record,) = s.host.ollama.requests_for("POST", f"/api/blobs/sha256:{digest}")
        assert record.body_length == len(data)
        assert record.header(b"expect") is None
