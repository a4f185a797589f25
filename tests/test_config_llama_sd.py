"""Settings of llama.cpp, sd-server and the port that fronts both; stadi's names and defaults."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile import config as c
from turnstile import sdargs
from turnstile.config import Config, ConfigError, Upstream, load
from turnstile.tap import Options

NO_FILE = "/nonexistent/turnstile.env"
ARGS = "-m model.gguf --listen-port 55557"
SD = {"SD_ARGS": ARGS}
WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"])), min_size=1)


def configure(environ, options=None):
    return load(options or {}, environ, default_file=NO_FILE)


def refused(environ, options=None):
    with pytest.raises(ConfigError) as caught:
        configure(environ, options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- stadi's names: variable, option, the seed's default, a value, where it goes, what it becomes

STADI = [
    (
        "STADI_LISTEN",
        "listen",
        "127.0.0.1:55558",
        "127.0.0.1:9",
        "listen_broker",
        "tcp:9:interface=127.0.0.1",
    ),
    ("STADI_LLM", "llm", "http://127.0.0.1:55555", "http://a:1", "llama_url", "http://a:1"),
    ("STADI_SD", "sd", "http://127.0.0.1:55557", "http://[::1]:2", "sd_url", "http://[::1]:2"),
    ("STADI_IDLE", "idle", "5m", "1m30s", "sd_idle", 90.0),
    ("STADI_BUSY_WAIT", "busy-wait", "2m", "3s", "busy_wait", 3.0),
    ("STADI_VRAM_WAIT", "vram-wait", "45s", "4s", "vram_wait", 4.0),
    ("STADI_LOAD_WAIT", "load-wait", "15m", "1h", "load_wait", 3600.0),
    ("STADI_FREE_GIB", "free-gib", "2", "0.5", "free_gib", 0.5),
    ("STADI_SD_BIN", "sd-bin", "sd-server", "/opt/sd", "sd_bin", "/opt/sd"),
    ("STADI_SD_ARGS", "sd-args", "", "-m 'a b'", "sd_args", ("-m", "a b")),
    ("STADI_SD_LOG_DIR", "sd-log-dir", "", "/var/log/x", "sd_log_dir", "/var/log/x"),
]
IDS = [row[0] for row in STADI]


def plain(value):
    return str(value) if isinstance(value, Upstream) else value


@pytest.mark.parametrize(
    ("variable", "option", "default", "text", "field", "value"), STADI, ids=IDS
)
def test_stadis_variables_and_flags(variable, option, default, text, field, value):
    config = configure({**SD, variable: text} if field != "sd_args" else {variable: text})
    assert plain(getattr(config, field)) == value
    assert config.source_of(field) == f"environment variable {variable}"
    # The flag, with two dashes, as twistd would get it.
    options = Options({"STADI_SD_ARGS": ARGS, variable: "garbage that is not looked at"})
    options.parseOptions([f"--{option}", text])
    assert plain(getattr(options.config, field)) == value
    assert options.config.source_of(field) == f"--{option}"


@pytest.mark.parametrize(
    ("variable", "option", "default", "text", "field", "value"), STADI, ids=IDS
)
def test_stadis_variables_in_the_file(tmp_path, variable, option, default, text, field, value):
    path = tmp_path / "turnstile.env"
    path.write_text(c.format_env_file({"SD_ARGS": ARGS} | {variable: text}))
    if field == "sd_args":
        path.write_text(c.format_env_file({variable: text}))
    config = load({"config": str(path)}, {})
    assert plain(getattr(config, field)) == value


@pytest.mark.parametrize(
    ("variable", "option", "default", "text", "field", "value"), STADI, ids=IDS
)
def test_stadis_defaults(variable, option, default, text, field, value):
    config = configure({"STADI_SD_ARGS": ARGS})
    if field == "sd_args":
        assert config.sd_args == ("-m", "model.gguf", "--listen-port", "55557")
        return
    setting = next(setting for setting in c.SETTINGS if setting.field == field)
    assert getattr(config, field) == setting.parse(default)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("listen-broker", "listen"),
        ("llama", "llm"),
        ("sd-idle", "idle"),
    ],
)
def test_flags_that_have_two_names(ours, theirs):
    setting = next(setting for setting in c.SETTINGS if setting.option == ours)
    assert setting.option_aliases == (theirs,)
    found = []
    text = {"listen-broker": ":7", "llama": "http://x:7", "sd-idle": "7s"}[ours]
    for name in (ours, theirs):
        options = Options(dict(SD))
        options.parseOptions([f"--{name}={text}"])
        found.append(getattr(options.config, setting.field))
    assert found[0] == found[1] == setting.parse(text)


def test_a_name_of_ours_wins_over_stadis_only_where_both_have_a_value():
    assert configure({**SD, "SD_IDLE": "1s", "STADI_IDLE": "2s"}).sd_idle == 1
    assert configure({**SD, "SD_IDLE": "", "STADI_IDLE": "2s"}).sd_idle == 2


# -- which listeners there are


def places(environ):
    return dict(configure(environ).listeners())


BROKER = {"LISTEN_BROKER": "tcp:55558:interface=127.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # stadi: nothing but its own names
        (SD, BROKER),
        ({**SD, "LLAMA_URL": "http://a:1"}, BROKER),
        ({**SD, "STADI_LISTEN": ":9"}, {"LISTEN_BROKER": "tcp:9:interface=127.0.0.1"}),
        ({**SD, "STADI_LISTEN": "*:9"}, {"LISTEN_BROKER": "tcp:9"}),
        ({**SD, "LISTEN_SD": ""}, BROKER),
        # ports of their own
        ({**SD, "LISTEN_SD": ":7"}, {"LISTEN_SD": "tcp:7"}),
        ({**SD, "LISTEN_LLAMA": ":6"}, {"LISTEN_SD": "tcp:1234"}),
        (
            {**SD, "LLAMA_URL": "http://a:1", "LISTEN_LLAMA": ":6"},
            {"LISTEN_LLAMA": "tcp:6", "LISTEN_SD": "tcp:1234"},
        ),
        (
            {**SD, "LLAMA_URL": "http://a:1", "LISTEN_SD": ":7"},
            {"LISTEN_LLAMA": "tcp:8080", "LISTEN_SD": "tcp:7"},
        ),
        (
            {**SD, "OLLAMA_URL": "http://a:1"},
            {"LISTEN_OLLAMA": "tcp:11434", "LISTEN_SD": "tcp:1234"},
        ),
        (
            {**SD, "COMFY_URL": "http://a:1", "LLAMA_URL": "http://b:1"},
            {"LISTEN_COMFY": "tcp:8188", "LISTEN_LLAMA": "tcp:8080", "LISTEN_SD": "tcp:1234"},
        ),
        ({"LLAMA_URL": "http://a:1"}, {"LISTEN_LLAMA": "tcp:8080"}),
        # the broker, and what is named beside it
        (
            {**SD, "OLLAMA_URL": "http://a:1", "LISTEN_BROKER": "9"},
            {"LISTEN_OLLAMA": "tcp:11434", "LISTEN_BROKER": "tcp:9:interface=127.0.0.1"},
        ),
        (
            {**SD, "LISTEN_BROKER": ":9", "LISTEN_LLAMA": ":6", "LISTEN_SD": ":7"},
            {
                "LISTEN_BROKER": "tcp:9:interface=127.0.0.1",
                "LISTEN_LLAMA": "tcp:6",
                "LISTEN_SD": "tcp:7",
            },
        ),
    ],
)
def test_listeners(environ, expected):
    assert places(environ) == expected


def test_stadis_defaults_are_told():
    config = configure(SD)
    assert str(config.llama_url) == "http://127.0.0.1:55555"
    assert config.source_of("llama_url") == config.source_of("listen_broker") == "stadi's default"
    assert any("127.0.0.1:55558" in notice for notice in config.notices)
    assert (
        "LISTEN_BROKER",
        "tcp:55558:interface=127.0.0.1",
        "stadi's default",
    ) in config.describe()


def test_where_they_do_not_apply():
    config = configure({**SD, "OLLAMA_URL": "http://a:1"})
    assert config.llama_url is config.listen_broker is None
    config = configure({"OLLAMA_URL": "http://a:1", "STADI_IDLE": "1m", "STADI_SD": ""})
    assert config.llama_url is config.listen_broker is config.sd_args is None
    assert config.listeners() == [("LISTEN_OLLAMA", "tcp:11434")]


def test_a_broker_always_has_a_llama():
    config = configure({**SD, "OLLAMA_URL": "http://a:1", "LISTEN_BROKER": ":9"})
    assert str(config.llama_url) == "http://127.0.0.1:55555"


def test_what_a_start_says_can_be_read_back(tmp_path):
    config = configure({**SD, "OLLAMA_URL": "http://a:1", "FREE_GIB": "1.25", "GPU": "0"})
    path = tmp_path / "turnstile.env"
    path.write_text(c.format_env_file({name: value for name, value, _ in config.describe()}))
    assert load({"config": str(path)}, {}) == config


# -- what is refused


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"SD_URL": "http://127.0.0.1:55557"}, "SD_URL without SD_ARGS"),
        ({"STADI_SD": "http://127.0.0.1:5"}, "SD_URL without SD_ARGS"),
        (
            {"SD_URL": "http://127.0.0.1:5", "OLLAMA_URL": "http://a:1"},
            "SD_URL without SD_ARGS",
        ),
        ({"LISTEN_BROKER": ":1"}, "LISTEN_BROKER without SD_ARGS"),
        ({"STADI_LISTEN": ":1", "STADI_SD_ARGS": " "}, "LISTEN_BROKER without SD_ARGS"),
        ({"SD_ARGS": "-m 'a"}, "can't be split into words: No closing quotation"),
        ({"SD_ARGS": "a\\"}, "can't be split into words"),
        ({"SD_ARGS": "a\x01b"}, "control characters"),
        ({**SD, "SD_URL": "https://127.0.0.1:5"}, "sd-server has no TLS"),
        ({**SD, "LLAMA_URL": "http://127.0.0.1:55557"}, "LLAMA_URL and SD_URL are the same"),
        (
            {**SD, "SD_URL": "http://127.0.0.1:55558"},
            "SD_URL (http://127.0.0.1:55558) is turnstile",
        ),
        (
            {**SD, "LISTEN_SD": ":55557"},
            "SD_URL (http://127.0.0.1:55557) is turnstile's own LISTEN",
        ),
        (
            {**SD, "LISTEN_SD": ":9", "LISTEN_BROKER": ":9"},
            "LISTEN_SD and LISTEN_BROKER are the same",
        ),
        ({"LLAMA_URL": "http://localhost:8080"}, "turnstile's own LISTEN_LLAMA"),
        ({**SD, "SD_IDLE": "-1s"}, "can't be negative"),
        ({**SD, "FREE_GIB": "two"}, "'two' is not a number"),
        ({**SD, "FREE_GIB": "1e3"}, "not a number"),
        ({**SD, "FREE_GIB": "nan"}, "not a number"),
        ({**SD, "FREE_GIB": "999999"}, "out of range (0 to 100000)"),
        ({**SD, "VRAM_PROBE": "rocm"}, "not one of auto, nvml, amdgpu"),
        ({**SD, "VRAM_PROBE": "command"}, "no VRAM_PROBE_COMMAND"),
        ({**SD, "VRAM_PROBE": "comfyui"}, "no COMFY_URL"),
        ({"LLAMA_URL": "http://a:1", "LLAMA_STOP_COMMAND": "x"}, "go together"),
        ({"LLAMA_URL": "http://a:1", "LLAMA_START_COMMAND": "x"}, "go together"),
    ],
)
def test_refused(environ, reason):
    assert reason in refused(environ)


@pytest.mark.parametrize("value", ["s3cret key", "s3cret\x01", "s3cr\u00e9t"])
def test_a_key_is_never_shown(value):
    message = refused({"LLAMA_URL": "http://a:1", "LLAMA_API_KEY": value})
    assert "s3cr" not in message
    config = configure({"LLAMA_URL": "http://a:1", "LLAMA_API_KEY": "s3cret"})
    assert config.llama_api_key == "s3cret"
    assert ("LLAMA_API_KEY", "***", "environment variable LLAMA_API_KEY") in config.describe()
    assert "s3cret" not in repr(config)


# -- commands


@given(WORDS)
def test_any_words_make_a_command_line(words):
    setting = next(setting for setting in c.SETTINGS if setting.field == "sd_args")
    text = setting.format(tuple(words))
    assert setting.parse(text) == tuple(words)
    assert Config(sd_args=tuple(words)).sd_args == tuple(words)


@given(st.text())
def test_any_text_is_a_command_line_or_refused(text):
    setting = next(setting for setting in c.SETTINGS if setting.field == "sd_args")
    try:
        words = setting.parse(text)
    except ValueError:
        return
    assert words is None or shlex.split(text.strip()) == list(words)


@given(st.integers(0, 100_000 * 10**9))
def test_gibs_round_trip(billionths):
    setting = next(setting for setting in c.SETTINGS if setting.field == "free_gib")
    value = billionths / 1e9
    assert setting.parse(setting.format(value)) == pytest.approx(value, abs=1e-9)
    text = setting.format(value)
    assert setting.format(setting.parse(text)) == text


# -- sd-server's command line

URL = Upstream.parse("http://127.0.0.1:55557")


@pytest.mark.parametrize(
    ("args", "port"),
    [
        ("-m a", None),
        ("--listen-port 9", 9),
        ("--listen-port=9", 9),
        ("--listen-port 8 --listen-port 9", 9),
        ("--listen-port", None),
        ("--listen-port x", None),
        ("--listen-ports 9", None),
    ],
)
def test_the_port_of_a_command_line(args, port):
    assert sdargs.listen_port(args.split()) == port


@pytest.mark.parametrize(
    ("program", "args", "url", "added"),
    [
        ("sd-server", "-m a", "http://127.0.0.1:5", "--listen-port 5"),
        ("/opt/sd/sd-server", "-m a", "http://localhost:5", "--listen-port 5"),
        ("sd-server", "-m a", "http://127.0.0.2:5", "--listen-ip 127.0.0.2 --listen-port 5"),
        ("sd-server", "-l 127.0.0.2", "http://127.0.0.2:5", "--listen-port 5"),
        ("sd-server", "--listen-port 6", "http://127.0.0.1:5", ""),
        ("my-wrapper", "-m a", "http://127.0.0.1:5", ""),
        ("docker", "run sd-server", "http://127.0.0.1:5", ""),
    ],
)
def test_a_command_line_that_names_no_address_gets_one(program, args, url, added):
    words = args.split()
    found = sdargs.with_address(program, words, Upstream.parse(url))
    assert found == (*words, *added.split())
    if added:
        assert sdargs.warnings(program, found, Upstream.parse(url)) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (ARGS, []),
        ("--listen-port 55557 --params-backend cpu", ["--params-backend"]),
        ("--listen-port 55557 --params-backend=cpu --backend x", ["--params-backend"]),
        ("--listen-port 1", ["listen on port 1, SD_URL says 55557"]),
        ("--listen-port 1 --params-backend x", ["--auto-fit", "listen on port 1"]),
        ("-m a", []),
        ("-m ~/a", ["no shell reads it"]),
        ("-m a~b", []),
        ("-m $HOME/a", ["no shell reads it"]),
    ],
)
def test_warnings(args, said):
    notices = configure({"SD_ARGS": args, "LISTEN_SD": ":7"}).notices
    assert len(notices) == len(said)
    for notice, text in zip(notices, said, strict=True):
        assert text in notice


def test_warnings_about_a_wrapper_and_another_machine():
    found = sdargs.warnings("wrapper", ["-m", "a"], URL)
    assert len(found) == 1 and "names no --listen-port" in found[0]
    assert sdargs.warnings("wrapper", ["-m", "a"], Upstream.parse("http://127.0.0.1:1234")) == []
    found = sdargs.warnings("sd-server", ARGS.split(), Upstream.parse("http://gpu:55557"))
    assert len(found) == 1 and "not this machine" in found[0]


@given(WORDS, st.integers(1, 65535))
def test_an_address_is_added_once(words, port):
    url = Upstream("http", "127.0.0.1", port)
    once = sdargs.with_address("sd-server", words, url)
    assert sdargs.with_address("sd-server", once, url) == once
    assert once[: len(words)] == tuple(words)
