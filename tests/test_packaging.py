"""The package: what is shipped, and that twistd finds the plugin however it was installed."""

import configparser
import os
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import turnstile

ROOT = Path(turnstile.__file__).resolve().parent.parent
checkout = pytest.mark.skipif(not (ROOT / "setup.cfg").exists(), reason="not a checkout")


def run(*command, cwd, **environ):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GPU_TURNSTILE"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, "PYTHONDONTWRITEBYTECODE": "1", **environ},
        capture_output=True,
        text=True,
    )


def finds_plugin(*twistd, cwd, **environ):
    """twistd prints turnstile's help, and nothing else."""
    done = run(*twistd, "turnstile", "--help", cwd=cwd, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "LLM_WAIT_TIMEOUT" in done.stdout
    done = run(*twistd, "--help", cwd=cwd, **environ)
    assert "Let several GPU engines share one card" in " ".join(done.stdout.split())
    assert done.stderr == ""


def upset_caches(plugins):
    """Leave every kind of plugin cache that an installation may leave, one after the other."""
    cache = plugins / "dropin.cache"

    def remove():
        if cache.is_dir():
            cache.rmdir()
        elif cache.exists():
            cache.unlink()

    remove()
    yield "none"
    assert cache.exists()  # twistd made one
    cache.write_bytes(pickle.dumps({}))
    later = time.time() + 86400
    os.utime(cache, (later, later))
    yield "older than the plugin, but dated later"
    cache.write_bytes(b"nonsense")
    yield "corrupt"
    remove()
    cache.mkdir()
    yield "neither readable nor writable"
    remove()


# -- the checkout


@checkout
def test_nothing_of_ours_makes_twisted_a_package():
    assert not (ROOT / "twisted" / "__init__.py").exists()
    assert not (ROOT / "twisted" / "plugins" / "__init__.py").exists()


@checkout
def test_the_plugin_imports_nothing_of_turnstile():
    code = (
        "import sys, twisted.plugins.turnstile_plugin as p\n"
        "assert not [name for name in sys.modules if name.startswith('turnstile')]\n"
        "assert p.turnstile.tapname == 'turnstile'\n"
    )
    done = run(sys.executable, "-c", code, cwd=ROOT, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


def as_checkout(folder):
    """The parts that a plugin search looks at."""
    for part in ("turnstile", "twisted"):
        shutil.copytree(
            ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.pyc", "*.cache")
        )
    return folder


TWISTD = (sys.executable, "-c", "from twisted.scripts.twistd import run; run()")


@checkout
def test_a_checkout_on_the_path(tmp_path):
    folder = as_checkout(tmp_path)
    for _ in upset_caches(folder / "twisted" / "plugins"):
        finds_plugin(*TWISTD, cwd="/", PYTHONPATH=str(folder))


@checkout
def test_a_plugin_that_went_away_leaves_no_trace(tmp_path):
    folder = as_checkout(tmp_path)
    finds_plugin(*TWISTD, cwd="/", PYTHONPATH=str(folder))
    (folder / "twisted" / "plugins" / "turnstile_plugin.py").unlink()
    code = (
        "from twisted.plugin import getPlugins\n"
        "from twisted.application.service import IServiceMaker\n"
        f"from twisted import plugins; plugins.__path__[:] = [{str(folder / 'twisted/plugins')!r}]\n"
        "assert 'turnstile' not in [plugin.tapname for plugin in getPlugins(IServiceMaker)]\n"
    )
    done = run(sys.executable, "-c", code, cwd="/", PYTHONPATH=str(folder))
    assert (done.returncode, done.stderr) == (0, "")


@checkout
@pytest.mark.parametrize(
    "name",
    "script/bootstrap script/test script/demo script/build-deb script/test-deb script/version"
    " debian/rules debian/turnstile.postinst debian/turnstile.prerm debian/turnstile.postrm .ci/run".split(),
)
def test_scripts(name):
    first = (ROOT / name).read_text().splitlines()[0]
    assert first.startswith("#!")
    # dpkg makes its own scripts executable.
    assert os.access(ROOT / name, os.X_OK) or name.startswith("debian/turnstile.")
    if first.endswith("sh"):
        assert run("sh", "-n", ROOT / name, cwd="/").stderr == ""


@checkout
def test_bootstrap_explains_what_is_missing(tmp_path):
    (tmp_path / "script").mkdir()
    for name in ("script/bootstrap", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    fake = tmp_path / "python"
    fake.write_text(
        "#!/bin/sh\ncase $2 in *ensurepip*) echo 'No module named ensurepip' >&2; exit 1;; esac\n"
    )
    fake.chmod(0o755)
    done = run("sh", tmp_path / "script/bootstrap", "run", cwd="/", PYTHON=str(fake))
    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr
    assert done.stderr.count("\n") == 1
    fake.write_text("#!/bin/sh\nexit 1\n")
    done = run("sh", tmp_path / "script/bootstrap", "run", cwd="/", PYTHON=str(fake))
    assert done.returncode == 1
    assert "is not Python 3.11 or newer" in done.stderr


@checkout
def test_runtime_dependencies():
    """Anything more needs a reason in the README."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    names = {line.partition(">")[0] for line in setup["options"]["install_requires"].split()}
    assert names == {
        "attrs",
        "autobahn",
        "prometheus-client",
        "service-identity",
        "treq",
        "twisted[tls]",
    }


# -- built and installed


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The files as they are now, in a shallow clone without tags where git is at hand."""
    folder = tmp_path_factory.mktemp("build") / "source"
    git = ["git", "-c", f"safe.directory={ROOT}", "-c", f"safe.directory={ROOT}/.git"]
    listed = run(*git, "ls-files", "-co", "--exclude-standard", cwd=ROOT)
    if listed.returncode == 0:
        run(*git, "clone", "-q", "--no-tags", "--depth=1", f"file://{ROOT}", folder, cwd="/")
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
    else:
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".venv", ".git", "*.egg-info"))
    return folder


@pytest.fixture(scope="module")
def wheel(source):
    pytest.importorskip("build")
    out = source.parent / "dist"
    done = run(sys.executable, "-m", "build", "--outdir", out, source, cwd=source.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(out.glob("turnstile-*.tar.gz"))) == 1
    (path,) = out.glob("turnstile-*.whl")
    return path


@checkout
@pytest.mark.slow
@pytest.mark.limit(300)
def test_what_the_wheel_holds(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in names if ".dist-info/" not in name}
    assert "twisted/plugins/turnstile_plugin.py" in code
    assert "turnstile/config.py" in code
    assert "turnstile/py.typed" in code
    units = {name for name in code if name.startswith("turnstile/systemd/")}
    assert {"turnstile/systemd/turnstile.service", "turnstile/systemd/drop-ins/gpu.conf"} < units
    assert {name.partition("/")[0] for name in code} == {"turnstile", "twisted"}
    assert {name for name in code if name.startswith("twisted/")} == {
        "twisted/plugins/turnstile_plugin.py"
    }
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "turnstile").rglob("*.py")}
    assert here <= code


@checkout
@pytest.mark.slow
@pytest.mark.limit(300)
def test_clean_installs(wheel, source, tmp_path):
    venv = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", venv, cwd="/").returncode == 0
    pip = (venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q")
    twistd = venv / "bin" / "twistd"

    done = run(*pip, "install", "--no-compile", wheel, cwd="/")
    assert done.returncode == 0, done.stderr
    (plugins,) = venv.glob("lib/python3*/site-packages/twisted/plugins")
    for _ in upset_caches(plugins):
        finds_plugin(twistd, cwd=tmp_path)
    version = run(twistd, "turnstile", "--version", cwd=tmp_path).stdout
    assert version.startswith("turnstile 0.") and "checkout" not in version

    done = run(*pip, "uninstall", "-y", "turnstile", cwd="/")
    assert done.returncode == 0, done.stderr
    assert "turnstile" not in run(twistd, "--help", cwd=tmp_path).stdout
    assert (plugins / "__init__.py").exists()  # Twisted's own

    done = run(*pip, "install", "--no-deps", "-e", source, cwd="/")
    assert done.returncode == 0, done.stderr
    for _ in upset_caches(source / "twisted" / "plugins"):
        finds_plugin(twistd, cwd=tmp_path)
