"""Settings: where they come from, what they accept, and what is said about those they don't."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile import config as c
from turnstile.config import Config, ConfigError, Upstream, load, parse_env_file, parse_listen
from turnstile.durations import format_duration, parse_duration

OLLAMA = {"OLLAMA_URL": "http://127.0.0.1:11435"}
NANOSECONDS = st.integers(0, int(c.LONGEST * 1e9))


def configure(options=None, environ=OLLAMA, text=None, tmp_path=None, **more):
    if text is not None:
        path = tmp_path / "turnstile.env"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        options = {"config": str(path), **(options or {})}
    return load(options or {}, environ, **{"default_file": "/nonexistent/turnstile.env", **more})


def refused(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        configure(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- durations


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("1m30s", 90),
        ("1.5h", 5400),
        ("2h45m", 9900),
        ("100us", 1e-4),
        ("100\u00b5s", 1e-4),
        ("100\u03bcs", 1e-4),
        ("7ns", 7e-9),
        ("90", 90),
        ("0.5", 0.5),
        (".5s", 0.5),
        ("1.s", 1),
        ("+10m", 600),
        ("0", 0),
        ("0s", 0),
        (" 10s ", 10),
        ("1h1h", 7200),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        *"-1 -1s - + . s 1x 10d nan inf infinity NaN 1e3 1e999 0x10 1_000 1,5s 1s500 s1".split(),
        *["", " ", "1 s", "1m 30s", "1s\n2s", "1\xa0s", "\u0661s", "9" * 65, "9" * 5000 + "s"],
    ],
)
def test_durations_refused(text):
    with pytest.raises(ValueError):
        parse_duration(text)


@given(NANOSECONDS)
def test_durations_round_trip(nanoseconds):
    seconds = nanoseconds / 1e9
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.text())
def test_any_text_is_a_duration_or_a_value_error(text):
    try:
        seconds = parse_duration(text)
    except ValueError:
        return
    assert math.isfinite(seconds) and seconds >= 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (60, "1m"),
        (90, "1m30s"),
        (900, "15m"),
        (0.5, "500ms"),
        (1.5, "1.5s"),
        (7e-9, "7ns"),
    ],
)
def test_durations_written(seconds, text):
    assert format_duration(seconds) == text


# -- upstreams


@pytest.mark.parametrize(
    ("text", "parts", "netloc"),
    [
        ("http://127.0.0.1:11435", ("http", "127.0.0.1", 11435, ""), "127.0.0.1:11435"),
        ("http://gpu/", ("http", "gpu", 80, ""), "gpu"),
        ("HTTPS://GPU.example:443/", ("https", "gpu.example", 443, ""), "gpu.example"),
        ("https://gpu:8443/ollama/", ("https", "gpu", 8443, "/ollama"), "gpu:8443"),
        ("http://gpu:80/a%2Fb//c", ("http", "gpu", 80, "/a%2Fb//c"), "gpu"),
        ("http://[::1]:8189", ("http", "::1", 8189, ""), "[::1]:8189"),
        ("http://[0:0::1]", ("http", "::1", 80, ""), "[::1]"),
        ("http://[fe80::1%25eth0]:1", ("http", "fe80::1%eth0", 1, ""), "[fe80::1]:1"),
        ("http://b\u00fccher.example", ("http", "xn--bcher-kva.example", 80, ""), None),
        ("http://comfy_ui:8188", ("http", "comfy_ui", 8188, ""), None),
    ],
)
def test_upstreams(text, parts, netloc):
    upstream = Upstream.parse(text)
    assert (upstream.scheme, upstream.host, upstream.port, upstream.base_path) == parts
    assert netloc is None or upstream.netloc == netloc
    assert upstream.is_tls == (parts[0] == "https")
    assert Upstream.parse(upstream.url) == upstream


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("127.0.0.1:11435", "http://127.0.0.1:11435"),
        ("gpu", "not a URL"),
        ("ftp://gpu", "only http:// and https://"),
        ("http://", "host is missing"),
        ("http://:80", "host is missing"),
        ("http://gpu:x", "not a URL"),
        ("http://gpu:99999", "not a URL"),
        ("http://gpu:0", "port 0"),
        ("http://[::1", "not a URL"),
        ("http://[zz]", ""),
        ("http://gpu/?a=b", "no query"),
        ("http://gpu/#a", "no query"),
        ("http://gpu/a b", "blanks"),
        ("http://gpu\n", "blanks"),
        ("http://g pu", "blanks"),
        ("http://-gpu", "host name"),
        ("http://gpu/\u00fc", "percent-encode"),
    ],
)
def test_upstreams_refused(text, reason):
    with pytest.raises(ConfigError, match=".*" + reason.replace("?", r"\?")):
        Upstream.parse(text)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3cret@gpu",
        "ftp://me:s3cret@gpu",
        "http://me:s3cret@gpu:x",
        "http://me:s3/s3cret@gpu",
        "http://me:s3cret/@gpu:1",
        "http://me:s3cret#@gpu",
        "http://me:s3cret@[::1:80/",
        "http://me:s3cret\u2100@gpu",
        "me:s3cret@gpu:11435",
        "//me:s3cret@gpu:11435",
        "http://gpu/?token=s3cret",
        "http://gpu:x/?token=s3cret",
        "gpu?token=s3cret",
        "http://gpu/#s3cret",
    ],
)
def test_passwords_in_urls_are_refused_and_never_shown(url):
    message = refused(environ={"OLLAMA_URL": url})
    assert "s3cret" not in message
    assert message.startswith("environment variable OLLAMA_URL: ")


@given(st.text())
def test_any_text_is_an_upstream_or_a_config_error(text):
    for url in (text, "http://" + text):
        try:
            upstream = Upstream.parse(url)
        except ConfigError:
            continue
        assert Upstream.parse(upstream.url) == upstream


# -- listeners


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        (":11434", "tcp:11434"),
        ("11434", "tcp:11434"),
        ("*:11434", "tcp:11434"),
        ("127.0.0.1:11434", "tcp:11434:interface=127.0.0.1"),
        ("localhost:11434", "tcp:11434:interface=localhost"),
        ("[::1]:11434", r"tcp:11434:interface=\:\:1"),
        ("[::]:11434", r"tcp:11434:interface=\:\:"),
        ("tcp:11434", "tcp:11434"),
        ("tcp:11434:interface=127.0.0.1", "tcp:11434:interface=127.0.0.1"),
        (r"tcp6:11434:interface=\:\:1", r"tcp6:11434:interface=\:\:1"),
        ("unix:/run/turnstile.sock:mode=660", "unix:/run/turnstile.sock:mode=660"),
        ("systemd:domain=INET:index=0", "systemd:domain=INET:index=0"),
        ("systemd:domain=INET6:name=ollama", "systemd:domain=INET6:name=ollama"),
    ],
)
def test_listeners(text, endpoint):
    assert parse_listen(text) == endpoint
    assert parse_listen(endpoint) == endpoint


@pytest.mark.parametrize("text", ["11500", ":11500"])
def test_the_nested_listener_is_for_this_machine_only(text):
    environ = {**OLLAMA, "LISTEN_OLLAMA_NESTED": text}
    assert configure(environ=environ).listen_ollama_nested == "tcp:11500:interface=127.0.0.1"
    environ["LISTEN_OLLAMA_NESTED"] = "*:11500"
    assert configure(environ=environ).listen_ollama_nested == "tcp:11500"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "x",
        "tcp",
        "tcp:",
        "tcp:x",
        "tcp:99999",
        ":99999",
        ":999999999",
        "tcp:1:nonsense=2",
        "tcp:1:interface=::1",
        "tcp:1:2:3:4:5",
        "::1:11434",
        "[::1]",
        "[gpu]:1",
        "gpu :1",
        "unix:",
        "unix:/a:mode=rw",
        "systemd:",
        "systemd:domain=INET",
        "systemd:domain=INET:index=0:name=a",
        "systemd:domain=INTE:index=0",
        "systemd:domain=INET:index=x",
        "systemd:0:domain=INET",
        "stdio:",
        "nonsense:1:a=b",
        "ssl:1:privateKey=/nonexistent.pem",
        "tcp:1\\",
        "tcp:1\n",
        "\u0661",
    ],
)
def test_listeners_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_listen(text)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet=st.sampled_from(":[]=\\.*019ab/tcpunixsd")))
def test_any_text_is_a_listener_or_a_config_error(text):
    try:
        endpoint = parse_listen(text)
    except ConfigError:
        return
    assert parse_listen(endpoint) == endpoint


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (":1", "1", True),
        (":1", ":2", False),
        (":0", ":0", False),
        ("127.0.0.1:1", ":1", True),
        ("127.0.0.1:1", "127.0.0.2:1", False),
        ("[::]:1", "127.0.0.1:1", True),
        ("tcp:port=1", ":1", True),
        ("unix:/a", "unix:/b", False),
        ("unix:/a", "unix:/x/../a", True),
        ("unix:/a", "unix:/a:mode=600", True),
        ("unix:/a", ":1", False),
        ("systemd:domain=INET:index=0", "systemd:domain=INET:index=0", True),
        ("systemd:domain=INET:index=0", "systemd:domain=INET:index=1", False),
    ],
)
def test_two_listeners_at_one_address(one, other, same):
    environ = {
        **OLLAMA,
        "COMFY_URL": "http://127.0.0.1:8189",
        "LISTEN_OLLAMA": one,
        "LISTEN_COMFY": other,
    }
    if same:
        assert "LISTEN_OLLAMA and LISTEN_COMFY are the same" in refused(environ=environ)
    else:
        configure(environ=environ)
    del environ["COMFY_URL"]  # without its engine a listener isn't opened
    configure(environ=environ)


@pytest.mark.parametrize(
    ("url", "listen", "loop"),
    [
        ("http://127.0.0.1:11434", "", True),
        ("http://localhost:11434", "", True),
        ("http://[::1]:11434", "", True),
        ("http://127.0.0.2:11434", "", True),
        ("http://[::ffff:127.0.0.1]:11434", "", True),
        ("http://gpu.localhost:11434", "", True),
        ("http://127.0.0.2:11434", "127.0.0.1:11434", False),
        ("http://gpu:11434", "", False),
        ("http://127.0.0.1:11434", "192.0.2.1:11434", False),
        ("http://192.0.2.1:11434", "192.0.2.1:11434", True),
        ("http://127.0.0.1:11434", "unix:/a", False),
    ],
)
def test_an_engine_at_turnstiles_own_port(url, listen, loop):
    environ = {"OLLAMA_URL": url, "LISTEN_OLLAMA": listen}
    if loop:
        assert "turnstile's own LISTEN_OLLAMA" in refused(environ=environ)
    else:
        configure(environ=environ)


# -- the file


def test_the_files_forms(tmp_path):
    text = (
        "\ufeff# a comment\r\n\r\n  OLLAMA_URL = http://gpu:1  \r\n"
        "export COMFY_URL='http://gpu:2' # it too\n"
        'WARM_MODEL="a \\"b\\" \\\\ \\$c # d"\n'
        "LOG_FILE=/var/log/a#b # comment\n"
        "IMAGE_BURST=\n\texport\tLOG_LEVEL=debug\n"
        "LLM_BUSY_MODE=#nothing"
    )
    config = configure(environ={}, text=text, tmp_path=tmp_path)
    assert config.ollama_url == Upstream("http", "gpu", 1)
    assert config.comfy_url == Upstream("http", "gpu", 2)
    assert config.warm_model == 'a "b" \\ $c # d'
    assert config.log_file == "/var/log/a#b"
    assert config.image_burst == 0
    assert config.log_level == "debug"
    assert config.llm_busy_mode == "wait"
    assert config.source_of("comfy_url") == f"{config.file}:4"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("# fine\nOLLAMA_URL\n", 2, "not a KEY=VALUE line"),
        ("=x", 1, "can't be the name"),
        ("A B=x", 1, "can't be the name"),
        ("OLLAMA_URL='x", 1, "no closing quote"),
        ('OLLAMA_URL="x\\"', 1, "no closing quote"),
        ('OLLAMA_URL="x" y', 1, "after the closing quote"),
        (b"\n\nOLLAMA_URL=\xff", 3, "not UTF-8"),
        ("OLLAMA_URL=a\0b", 1, "control character"),
        ("OLLAMA_URL=a\rLOGLEVEL=b", 1, "control character"),
        ("OLLAMA_URL=http://a\n\nOLLAMA_URL=http://a", 3, "set already in line 1"),
        ("LOGLEVEL=info\nLOG_LEVEL=info", 2, "set already in line 1"),
        ("AUTO_UPDATE=1\nAUTO_UPDATE=1", 2, "set already in line 1"),
        ("OLAMA_URL=x", 1, "unknown setting OLAMA_URL (nearest: OLLAMA_URL)"),
        ("ollama_url=x", 1, "nearest: OLLAMA_URL"),
        ("zzzz=x", 1, "unknown setting zzzz (nearest: "),
        ("\nJOB_TIMEOUT=soon", 2, "JOB_TIMEOUT: 'soon' is not a duration"),
    ],
)
def test_malformed_files(tmp_path, text, line, reason):
    message = refused(environ=OLLAMA, text=text, tmp_path=tmp_path)
    assert f"turnstile.env:{line}: " in message
    assert reason in message


@given(st.binary())
def test_any_file_is_read_or_a_config_error(data):
    try:
        parse_env_file(data, "file")
    except ConfigError as error:
        assert str(error).startswith("file:")


@given(
    st.dictionaries(
        st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]*\Z"),
        st.text(st.characters(exclude_categories=["Cs", "Cc"])) | st.text(" \t#'\"\\$`=x"),
    )
)
def test_what_is_written_is_read_back(values):
    data = c.format_env_file(values).encode()
    assert {key: value for _, key, value in parse_env_file(data, "file")} == values


@pytest.mark.parametrize("values", [{"A": "x\ny"}, {"A B": "x"}, {"A": "\0"}])
def test_what_no_file_can_hold_is_not_written(values):
    with pytest.raises(ValueError):
        c.format_env_file(values)


def test_which_file_is_read(tmp_path):
    for name in ("option", "variable", "default"):
        (tmp_path / name).write_text(f"WARM_MODEL={name}\n")
    option, variable, default = (str(tmp_path / name) for name in ("option", "variable", "default"))
    environ = {**OLLAMA, "GPU_TURNSTILE_CONFIG": variable}
    assert configure({"config": option}, environ, default_file=default).warm_model == "option"
    assert configure({}, environ, default_file=default).warm_model == "variable"
    assert configure({}, OLLAMA, default_file=default).warm_model == "default"
    config = configure({}, OLLAMA, default_file=str(tmp_path / "missing"))
    assert config.warm_model is config.file is None
    environ["GPU_TURNSTILE_CONFIG"] = ""
    assert configure({}, environ, default_file=default).warm_model == "default"


def test_a_named_file_must_be_there(tmp_path):
    missing = str(tmp_path / "missing.env")
    for options, environ in (
        ({"config": missing}, OLLAMA),
        ({}, {**OLLAMA, "GPU_TURNSTILE_CONFIG": missing}),
    ):
        assert refused(options, environ) == f"configuration file {missing}: it does not exist"
    assert "can't be read: Is a directory" in refused({"config": str(tmp_path)})
    assert "1 MiB" in refused({"config": "/dev/zero"})
    assert "can't be read" in refused({"config": "a\0b"})
    # a default file that is there counts
    (tmp_path / "default").write_text("nonsense")
    assert ":1: not a KEY" in refused(default_file=str(tmp_path / "default"))


# -- all together


def test_precedence(tmp_path):
    text = "IMAGE_BURST=1\nLLM_MAX_INFLIGHT=1\nRETRY_STATUS_LIMIT=1\n"
    environ = {**OLLAMA, "IMAGE_BURST": "2", "LLM_MAX_INFLIGHT": "2"}
    config = configure({"image-burst": "3"}, environ, text, tmp_path)
    assert (config.image_burst, config.llm_max_inflight, config.retry_status_limit) == (3, 2, 1)
    assert config.source_of("image_burst") == "--image-burst"
    assert config.source_of("llm_max_inflight") == "environment variable LLM_MAX_INFLIGHT"
    assert config.source_of("retry_status_limit").endswith("turnstile.env:3")
    assert config.source_of("llm_busy_mode") == "default"


def test_an_empty_value_disables(tmp_path):
    text = "COMFY_URL=http://gpu\nWARM_MODEL=m\nJOB_TIMEOUT=1s"
    environ = {**OLLAMA, "COMFY_URL": "", "JOB_TIMEOUT": " "}
    config = configure({"warm-model": ""}, environ, text, tmp_path)
    assert config.comfy_url is config.warm_model is None
    assert config.job_timeout == 900


def test_the_alias_of_the_level():
    assert configure(environ={**OLLAMA, "LOG_LEVEL": "info"}).log_level == "info"
    assert configure(environ={**OLLAMA, "LOG_LEVEL": "info", "LOGLEVEL": ""}).log_level == "info"
    assert (
        configure(environ={**OLLAMA, "LOG_LEVEL": "info", "LOGLEVEL": "debug"}).log_level == "debug"
    )
    assert configure({"log-level": "Warning"}).log_level == "warn"
    assert configure({"loglevel": "ERROR"}).log_level == "error"


@pytest.mark.parametrize("environ", [{}, {"OLLAMA_URL": "", "COMFY_URL": " "}])
def test_no_engine(environ):
    assert refused(environ=environ).startswith("no engine: set OLLAMA_URL (--ollama), COMFY_URL")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("LLM_WAIT_TIMEOUT", "soon", "not a duration"),
        ("LLM_WAIT_TIMEOUT", "0", "out of range (1ms to 576h)"),
        ("LLM_WAIT_TIMEOUT", "-5s", "can't be negative"),
        ("LLM_WAIT_TIMEOUT", "nan", "not a duration"),
        ("LLM_WAIT_TIMEOUT", "9999999h", "out of range"),
        ("LLM_BUSY_MODE", "queue", "not one of wait, reject"),
        ("LLM_BUSY_STATUS", "399", "out of range (400 to 599)"),
        ("LLM_BUSY_STATUS", "600", "out of range"),
        ("LLM_BUSY_STATUS", "4_29", "not a whole number"),
        ("IMAGE_BURST", "-1", "out of range"),
        ("IMAGE_BURST", "1.5", "not a whole number"),
        ("IMAGE_BURST", "9" * 5000, "not a whole number"),
        ("FREE_BETWEEN_JOBS", "maybe", "neither true nor false"),
        ("JOB_TIMEOUT_ACTION", "kill", "not one of release, interrupt"),
        ("LOGLEVEL", "loud", "not one of error, warn, info, debug"),
        ("LOG_FORMAT", "xml", "not one of text, json"),
        ("LOG_FILE", "a\nb", "control characters"),
        ("LISTEN_OLLAMA", "nowhere", "not a listening address"),
        ("COMFY_URL", "gpu:1", "not a URL"),
        ("PROMPT_CAPTURE_LIMIT", "0", "out of range"),
    ],
)
def test_values_refused(name, text, reason):
    message = refused(environ={**OLLAMA, name: text})
    assert message.startswith(f"environment variable {name}: ")
    assert reason in message
    option = next(s.option for s in c.SETTINGS if s.env == name)
    assert refused({option: text}).startswith(f"--{option}: ")


def test_zero_where_it_makes_sense():
    config = configure(environ={**OLLAMA, "SHUTDOWN_TIMEOUT": "0", "BUSY_RETRY_AFTER": "0"})
    assert config.shutdown_timeout == config.busy_retry_after == 0


def test_backoff_bounds():
    assert "BACKOFF_MAX (1s) is less" in refused({"backoff-initial": "2s", "backoff-max": "1s"})


def test_keys_without_effect_start_with_a_notice(tmp_path):
    text = "".join(f"{key}=x\n" for key in sorted(c.RESERVED)) + "NO_COLOR=1\n"
    config = configure(text=text, tmp_path=tmp_path)
    assert len(config.notices) == len(c.RESERVED) + 1
    assert f"{config.file}:1: {min(c.RESERVED)} has no effect" in config.notices
    environ = {
        **OLLAMA,
        "WEIGHT": "2",
        "UPDATE_REPO": "",
        "STADI_LLM_WEIGHT": "3",
        "GPU_SHARE_WEIGHT": "2",
    }
    assert configure(environ=environ).notices == (
        "environment variable GPU_SHARE_WEIGHT has no effect",
        "environment variable STADI_LLM_WEIGHT has no effect",
    )


def test_the_key_of_a_card():
    assert configure(environ={**OLLAMA, "GPU_KEY": "GPU-1"}).gpu_key == "GPU-1"
    assert configure({"gpu-key": "metal-0"}).gpu_key == "metal-0"
    assert configure({"gpu-key": ""}).gpu_key is None
    # What turnstile-pace --gpu would look up.
    for text in ("0", "auto", "none", "a/b", "x" * 300):
        assert "key" in refused({"gpu-key": text})


def test_the_weight_of_sd_server():
    sd = {"sd-args": "-m x"}
    assert configure(sd, {}).sd_weight is None
    assert configure(sd, {"STADI_SD_WEIGHT": "2.5"}).sd_weight == 2.5
    assert configure({**sd, "sd-weight": "1"}, {"SD_WEIGHT": "3"}).sd_weight == 1.0
    for text in ("0", "-1", "nan", "1e3", "x"):
        assert "--sd-weight" in refused({**sd, "sd-weight": text})
    assert configure({"sd-weight": "2"}).notices == (
        "--sd-weight: SD_WEIGHT has no effect without SD_ARGS",
    )


def test_the_card_that_sd_server_shares():
    sd = {"sd-args": "-m x", "sd-weight": "2"}
    assert "GPU_KEY" in refused({**sd, "gpu": "0000:01:00.0"}, environ={})
    assert configure({**sd, "gpu": "0000:01:00.0", "gpu-key": "pci-1"}, {}).gpu_key == "pci-1"
    assert configure({**sd, "gpu": "1"}, {}).gpu == "1"


def test_reserved_keys_are_not_settings():
    assert not c.RESERVED & {setting.env for setting in c.SETTINGS}


def test_the_seeds_table():
    defaults = {setting.env: setting.default for setting in c.SETTINGS}
    seed = """LISTEN_OLLAMA=:11434 LISTEN_COMFY=:8188 OLLAMA_URL= COMFY_URL= UNLOAD_TIMEOUT=60s
        JOB_TIMEOUT=15m LLM_WAIT_TIMEOUT=10m LLM_BUSY_MODE=wait LLM_BUSY_STATUS=503
        BUSY_RETRY_AFTER=30 WARM_MODEL= LOGLEVEL=warn LOG_FORMAT=text LOG_FILE=
        UNLOAD_POLL_INTERVAL=500ms HISTORY_POLL_INTERVAL=1s PROBE_TIMEOUT=5s FREE_TIMEOUT=30s
        WARM_TIMEOUT=2m SHUTDOWN_TIMEOUT=10s BACKOFF_INITIAL=1s BACKOFF_MAX=60s
        PROMPT_CAPTURE_LIMIT=65536 UPDATE_INTERVAL=6h"""
    for pair in seed.split():
        name, _, default = pair.partition("=")
        assert defaults[name] == default


def test_the_listing_names_every_setting_and_can_be_read_back(tmp_path):
    config = configure(
        {"comfy": "https://[::1]:1/x/", "job-timeout": "1m30.5s", "free-between-jobs": "yes"}
    )
    listing = config.describe()
    assert [name for name, _, _ in listing] == [setting.env for setting in c.SETTINGS]
    assert ("JOB_TIMEOUT", "1m30.5s", "--job-timeout") in listing
    assert ("OLLAMA_URL", "http://127.0.0.1:11435", "environment variable OLLAMA_URL") in listing
    assert ("WARM_MODEL", "", "default") in listing
    text = c.format_env_file({name: value for name, value, _ in listing})
    assert configure(environ={}, text=text, tmp_path=tmp_path) == config


def test_a_config_made_by_hand_has_the_defaults():
    config = Config(llm_wait_timeout=2.0)
    assert config.listen_ollama == "tcp:11434"
    assert config.llm_wait_timeout == 2.0
    assert config.listen_ollama_nested is config.ollama_url is None
    assert config.unload_timeout == 60.0
    with pytest.raises(AttributeError):
        config.unload_timeout = 1.0


def test_listeners_of_enabled_engines():
    config = configure({"listen-ollama-nested": "1", "comfy": "http://gpu"}, {})
    assert config.listeners() == [("LISTEN_COMFY", "tcp:8188")]
    config = configure({"listen-ollama-nested": "1"})
    assert [name for name, _ in config.listeners()] == ["LISTEN_OLLAMA", "LISTEN_OLLAMA_NESTED"]


def test_the_updaters_settings(tmp_path):
    config = configure(environ=OLLAMA)
    assert (config.auto_update, config.update_repo) == (None, None)
    assert config.update_asset == "turnstile-*-py3-none-any.whl"
    # A file of the original starts, whatever it says of updates.
    text = (
        "OLLAMA_URL=http://a\nAUTO_UPDATE=true\nUPDATE_REPO=https://git.example/PUBLIC/gpu-turnstile\n"
        "UPDATE_ASSET=gpu-turnstile.exe\nUPDATE_INTERVAL=6h\n"
    )
    config = configure(text=text, tmp_path=tmp_path)
    assert config.auto_update is True and not config.notices
    assert str(config.update_repo) == "https://git.example/PUBLIC/gpu-turnstile"
    with pytest.raises(c.ConfigError, match="updates are fetched over https:// only"):
        configure(environ={**OLLAMA, "UPDATE_REPO": "http://git.example/a/b"})
    with pytest.raises(c.ConfigError, match="out of range"):
        configure(environ={**OLLAMA, "UPDATE_INTERVAL": "1s"})
