"""``twistd turnstile``: options, help, errors, logging and exit status, with the real twistd."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from twisted.application.service import Application, Service
from twisted.logger import ILogObserver
from twisted.scripts.twistd import ServerOptions

import turnstile
from turnstile import config, tap
from turnstile import log as tlog

ROOT = Path(turnstile.__file__).parent.parent

# Runs the real twistd, with a service of the test's own in the place of turnstile's.
RUNNER = """
import sys, types
from twisted.application.service import Service
from turnstile.log import Logger, log_startup
class TurnstileService(Service):
    def __init__(self, config, reactor):
        self.config, self.reactor, self.log = config, reactor, Logger(namespace="turnstile.service")
    def startService(self):
        Service.startService(self)
        log_startup(self.log, self.config, "1.2.3")
        %s
fake = types.ModuleType("turnstile.service")
fake.TurnstileService = TurnstileService
sys.modules["turnstile.service"] = fake
from twisted.scripts.twistd import run
sys.argv = ["twistd", *sys.argv[1:]]
sys.exit(run())
"""
STOP = "self.reactor.callLater(0, self.reactor.stop)"
OLLAMA = ["--ollama=http://gpu:1", "--config=/dev/null"]


def environment(**more):
    names = {name for setting in config.SETTINGS for name in (setting.env, *setting.env_aliases)}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **more}


def twistd(folder, *arguments, body=STOP, **more):
    return subprocess.run(
        [sys.executable, "-c", RUNNER % body, *arguments],
        cwd=folder,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def turn(folder, *arguments, **kwargs):
    return twistd(folder, "-n", "--pidfile=", "turnstile", *arguments, **kwargs)


# -- options


def parse(*arguments, environ=None):
    options = tap.Options(environ or {})
    options.parseOptions(list(arguments))
    return options


def test_every_setting_is_an_option():
    texts = {"ollama": "http://a", "comfy": "http://b", "llama": "http://d", "gpu-key": "metal-0"}
    commands = {"llama-stop-command": "x", "llama-start-command": "x", "sd-args": "x"}
    given = [f"--{name}={text}" for name, text in {"ollama": "http://c", **commands}.items()]
    for setting in config.SETTINGS:
        text = setting.default or texts.get(setting.option, "1")
        options = parse("--config=/dev/null", *given, f"--{setting.option}={text}")
        assert options.config.source_of(setting.field) == f"--{setting.option}"


def test_the_environment_is_asked():
    options = parse("--config=/dev/null", environ={"OLLAMA_URL": "http://a", "LOG_LEVEL": "info"})
    assert options.config.log_level == "info"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "no engine: set OLLAMA_URL (--ollama), COMFY_URL (--comfy), LLAMA_URL (--llama) or"),
        (["--ollama=x"], "--ollama: 'x' is not a URL (is it http://x ?)"),
        ([*OLLAMA, "--llm-wait-timeout=soon"], "--llm-wait-timeout: 'soon' is not a duration"),
        ([*OLLAMA, "--nonsense"], "option --nonsense not recognized"),
        ([*OLLAMA, "--job-timeout"], "option --job-timeout requires argument"),
        ([*OLLAMA, "extra"], "'extra' is not an option"),
        (["--config=/nonexistent"], "configuration file /nonexistent: it does not exist"),
        (["--config=/no\x1b[31m"], "configuration file /no\\x1b[31m: it does not exist"),
        (["--no\x1b[31m\xff"], "option --no\\x1b[31m\xff not recognized"),
    ],
)
def test_errors_are_one_line(arguments, line, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*arguments, environ={"GPU_TURNSTILE_CONFIG": "/dev/null"})
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"turnstile: {line}")
    assert err.count("\n") == 1


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"turnstile {turnstile.__version__}\n"


@pytest.mark.parametrize("columns", ["80", "40", "200", "x", "99999"])
def test_help_shows_everything(columns):
    text = tap.Options({"COLUMNS": columns}).getUsage()
    flat = " ".join(text.split())
    for setting in config.SETTINGS:
        assert f"--{setting.option}" in text
        assert f"[{setting.env}" in flat
        assert f"default: {setting.default or 'empty'}]" in flat
        assert setting.help in flat
    if columns == "80":
        assert max(map(len, text.splitlines())) <= 80


# -- makeService


class FakeService(Service):
    def __init__(self, config, reactor):
        self.config = config
        self.reactor = reactor


@pytest.fixture
def fake_service(monkeypatch):
    module = type(sys)("turnstile.service")
    module.TurnstileService = FakeService
    monkeypatch.setitem(sys.modules, "turnstile.service", module)
    before = (tlog._rank, tlog.info_enabled, tlog.debug_enabled, tlog._current)
    yield
    tlog._rank, tlog.info_enabled, tlog.debug_enabled, tlog._current = before


def test_the_service_and_its_one_observer(fake_service):
    reactor = object()
    root = tap.makeService(parse(*OLLAMA), reactor)
    (service,) = list(root)
    assert isinstance(service, FakeService)
    assert service.reactor is reactor
    assert service.config.ollama_url == config.Upstream("http", "gpu", 1)
    application = Application("turnstile")
    root.setServiceParent(application)
    assert isinstance(application.getComponent(ILogObserver), tlog.Observer)


class Twistd(ServerOptions):
    subCommands = []


def under_twistd(*arguments, twistd=("-n",)):
    options = tap.Options({})
    options.parent = Twistd()
    options.parent.parseOptions(list(twistd))
    options.parseOptions(["--config=/dev/null", "--ollama=http://gpu", *arguments])
    return options


def test_where_the_log_goes(fake_service, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def sink(*arguments, twistd):
        tap.makeService(under_twistd(*arguments, twistd=twistd), object())
        sink = tlog._current.sink
        return sink.path if isinstance(sink, tlog.LogFile) else sink

    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert sink(twistd=["-n", f"--logfile={a}"]) == a
    assert sink(twistd=[f"--logfile={a}"]) == a
    assert sink(f"--log-file={b}", twistd=["-n", f"--logfile={a}"]) == b
    assert sink(f"--log-file={b}", twistd=["--syslog"]) == b
    assert sink(twistd=[]) == str(tmp_path / "twistd.log")
    assert isinstance(sink(twistd=["-n"]), tlog.StreamSink)
    assert isinstance(sink(twistd=["-n", "--logfile=-"]), tlog.StreamSink)
    assert isinstance(sink(twistd=["--syslog", "--prefix=x"]), tlog.SyslogSink)


@pytest.mark.parametrize(
    ("arguments", "twistd", "reason"),
    [
        (
            ["--log-file=/nonexistent/x"],
            ["-n"],
            "log file /nonexistent/x: can't be written: No such",
        ),
        ([], ["--logfile=/nonexistent/x"], "log file /nonexistent/x: can't be written: No such"),
        ([], ["--logfile=-"], "a daemon can't log to standard output"),
        ([], ["-n", "--pidfile=/nonexistent/x"], "pid file /nonexistent/x: can't be written"),
    ],
)
def test_a_log_that_cannot_be_written(fake_service, capsys, arguments, twistd, reason):
    with pytest.raises(SystemExit):
        tap.makeService(under_twistd(*arguments, twistd=twistd), object())
    err = capsys.readouterr().err
    assert err.startswith(f"turnstile: {reason}")
    assert err.count("\n") == 1


def test_without_a_pid_file_its_folder_does_not_matter(fake_service, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    tap.makeService(under_twistd(twistd=["-n", "--pidfile="]), object())


# -- the real twistd


def test_a_run(tmp_path):
    done = turn(tmp_path, *OLLAMA, "--log-level=info")
    assert done.returncode == 0
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert all(re.match(r"\d{4}-.*Z INFO  (turnstile|setting|configuration) ", x) for x in lines)
    assert sum("turnstile 1.2.3 starting" in line for line in lines) == 1  # one observer only
    assert list(tmp_path.iterdir()) == []


def test_help_and_version(tmp_path):
    done = turn(tmp_path, "--help")
    assert done.returncode == 0
    assert "--listen-ollama-nested" in done.stdout
    assert "LISTEN_OLLAMA_NESTED" in done.stdout
    assert done.stderr == ""
    done = turn(tmp_path, "--version")
    assert done.stdout.startswith("turnstile ")


def test_a_configuration_error(tmp_path):
    done = turn(tmp_path, "--config=/dev/null")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "turnstile: no engine: set OLLAMA_URL (--ollama), COMFY_URL (--comfy), LLAMA_URL (--llama) or"
        " SD_ARGS (--sd-args)\n"
    )
    done = twistd(tmp_path, "turnstile", *OLLAMA, "--log-file=/nonexistent/x")  # a daemon
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


FAIL = "from turnstile.exitcode import fail_startup; fail_startup(self.reactor, 'port taken')"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (f"from turnstile.exitcode import set_exit_status; set_exit_status(3); {STOP}", 3),
        (FAIL, 1),
        (f"{FAIL}; fail_startup(self.reactor, 'another', code=5)", 1),
        (STOP, 0),
    ],
)
def test_exit_status(tmp_path, body, status):
    done = twistd(tmp_path, "-n", "turnstile", *OLLAMA, body=body)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert ("ERROR port taken" in done.stderr) == ("port taken" in body)
    assert list(tmp_path.iterdir()) == []  # the pid file is gone


def test_exit_status_after_a_signal(tmp_path):
    body = "import os; self.reactor.callLater(0, os.kill, os.getpid(), 15)"
    assert turn(tmp_path, *OLLAMA, body=body).returncode in (0, -signal.SIGTERM)  # by version


def test_a_daemon_logs_to_a_file(tmp_path):
    done = twistd(tmp_path, "turnstile", *OLLAMA)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    deadline = time.monotonic() + 20
    log = tmp_path / "twistd.log"
    while not (log.exists() and "PROMPT_CAPTURE_LIMIT" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while (tmp_path / "twistd.pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "turnstile 1.2.3 starting" in log.read_text()


def test_a_daemon_that_cannot_start_says_so_where_it_was_started(tmp_path):
    done = twistd(tmp_path, "turnstile", *OLLAMA, body=FAIL)
    assert done.returncode == 1
    assert "port taken" in done.stderr and "Traceback" not in done.stderr
    deadline = time.monotonic() + 20
    log = tmp_path / "twistd.log"
    while not (log.exists() and "ERROR port taken" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while (tmp_path / "twistd.pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "Traceback" not in log.read_text()


def test_twistds_log_file_has_our_format(tmp_path):
    path = tmp_path / "log"
    done = twistd(tmp_path, "-n", f"--logfile={path}", "turnstile", *OLLAMA, "--log-format=json")
    assert done.stderr == ""
    assert path.read_text().startswith('{"time":')
