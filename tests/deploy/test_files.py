"""The files in deploy/ are what their readers take, and agree with one another and with autofit."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from jsonschema import Draft7Validator, ValidationError

from autofit.cli import cli
from autofit.service.boundary import CONNECTIONS, PROBES
from tests.ray_head import TOOLS

pytestmark = pytest.mark.quick

INSTRUCTIONS = {"FROM", "RUN", "COPY", "USER", "WORKDIR"}


@pytest.fixture(scope="module")
def deploy(root: Path) -> Path:
    """The folder."""
    return root / "deploy"


def parse(command: str) -> dict[str, Any]:
    """Return what ``autofit`` understands of a command line of its own."""
    program, name, *rest = shlex.split(command)
    assert program == "autofit"
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found.make_context(name, rest).params


# --- ray up -----------------------------------------------------------------------------------


def test_ray_up_takes_the_cluster(deploy: Path) -> None:
    """As the first thing that ``ray up`` does with a file: its own schema, its own checks."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((deploy / "ray-cluster.yaml").read_text())
    validate_config(prepare_config(config))
    with pytest.raises(Exception, match="head_start_commands"):
        validate_config(prepare_config({**config, "head_start_commands": []}))


def test_the_cluster_starts_with_a_token_on_a_private_interface(deploy: Path) -> None:
    config = yaml.safe_load((deploy / "ray-cluster.yaml").read_text())
    (head,) = (each for each in config["head_start_ray_commands"] if "ray start" in each)
    (worker,) = (each for each in config["worker_start_ray_commands"] if "ray start" in each)
    assert f"--node-ip-address={config['provider']['head_ip']} " in head
    assert "--include-dashboard=false" in head
    assert "RAY_AUTH_MODE=token" in head
    assert "RAY_AUTH_MODE=token" in worker
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for line in (head, worker):
        options = shlex.split(line.split("ray start ")[1])
        known = subprocess.run([TOOLS / "ray", "start", "--help"], capture_output=True, text=True)
        assert {each.split("=")[0] for each in options} <= set(
            re.findall(r"--[\w-]+", known.stdout)
        )


# --- systemd ----------------------------------------------------------------------------------


def test_the_unit_starts_the_service(deploy: Path) -> None:
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # as its documentation says
    unit.read(deploy / "autofit.service")
    program, _, rest = unit["Service"]["ExecStart"].partition(" ")
    options = parse(f"{Path(program).name} {rest}")
    folder = f"/var/lib/{unit['Service']['StateDirectory']}"
    assert options["storage"] == f"{folder}/autofit.db"
    assert unit["Service"]["KillMode"] == "process", "else a restart would end all searches"
    assert int(unit["Service"]["LimitNOFILE"]) > 2 * CONNECTIONS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(deploy: Path, tmp_path: Path) -> None:
    text = (deploy / "autofit.service").read_text()
    unit = tmp_path / "autofit.service"
    unit.write_text(text.replace("/opt/autofit/bin/autofit", "/bin/true"))
    line = ["systemd-analyze", "verify", "--man=no", str(unit)]
    ran = subprocess.run(line, capture_output=True, text=True)
    assert "autofit.service" not in ran.stderr, ran.stderr
    unit.write_text(unit.read_text().replace("KillMode=process", "KillMode=proces"))
    ran = subprocess.run(line, capture_output=True, text=True)
    assert "autofit.service" in ran.stderr, "it sees a mistake"


# --- Kubernetes -------------------------------------------------------------------------------


def resources(file: Path) -> dict[str, dict[str, Any]]:
    """Return the resources of a file by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(file.read_text())}


@pytest.fixture(scope="module")
def job(deploy: Path) -> dict[str, Any]:
    """The RayJob."""
    return resources(deploy / "kuberay.yaml")["RayJob"]


@pytest.fixture(scope="module")
def crd(root: Path) -> Draft7Validator:
    """What KubeRay's CRD says of a RayJob."""
    schema = yaml.safe_load((root / "tests/deploy/rayjob-v1.yaml").read_text())
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def test_the_crd_takes_the_rayjob(job: dict[str, Any], crd: Draft7Validator) -> None:
    crd.validate(job)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (["spec", "shutdownAfterJobFinish"], True),
        (["spec", "backoffLimit"], "2"),
        (["spec", "rayClusterSpec", "authOptions", "mode"], "password"),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "minReplicas"], None),
        (["spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "container"], []),
        (["apiVersion"], "ray.io/v1alpha1"),
    ],
)
def test_the_schema_sees_what_is_wrong(
    job: dict[str, Any], crd: Draft7Validator, place: list[Any], wrong: object
) -> None:
    broken = yaml.safe_load(yaml.safe_dump(job))
    inner = broken
    for step in place[:-1]:
        inner = inner[step]
    if wrong is None:
        del inner[place[-1]]
    else:
        inner[place[-1]] = wrong
    with pytest.raises(ValidationError):
        crd.validate(broken)


def test_the_jobs_command_parses_and_its_gpus_are_there(job: dict[str, Any]) -> None:
    asked = parse(job["spec"]["entrypoint"])
    assert asked["address"] == "auto"
    assert asked["storage"].startswith("postgresql+psycopg://")
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    gpus = worker["resources"]["limits"]["nvidia.com/gpu"] * group["replicas"]
    assert asked["gpus"] == gpus
    assert worker["image"] == head["image"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert "PGPASSWORD" in [each["name"] for each in head["env"]]


def test_one_ray_everywhere(deploy: Path, job: dict[str, Any]) -> None:
    """A cluster needs the same Ray on all its nodes."""
    named = set(re.findall(r"ray\[default\]==([\d.]+)", (deploy / "Dockerfile").read_text()))
    named |= set(re.findall(r"ray\[default\]==([\d.]+)", (deploy / "ray-cluster.yaml").read_text()))
    assert named == {job["spec"]["rayClusterSpec"]["rayVersion"]}
    assert tuple(map(int, named.pop().split("."))) <= tuple(map(int, version("ray").split(".")))


# --- the service on Kubernetes ----------------------------------------------------------------


@pytest.fixture(scope="module")
def service(deploy: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Service and the RayCluster."""
    found = resources(deploy / "kuberay-service.yaml")
    return found["Service"], found["RayCluster"]


def test_the_crd_takes_the_cluster_of_the_service(
    service: tuple[dict[str, Any], dict[str, Any]], crd: Draft7Validator
) -> None:
    """The spec of a RayCluster is that of a RayJob's cluster."""
    _, cluster = service
    spec = crd.schema["properties"]["spec"]["properties"]["rayClusterSpec"]
    checked = Draft7Validator({**spec, "definitions": crd.schema["definitions"]})
    checked.validate(cluster["spec"])
    wrong = {**cluster["spec"], "headGroupSpecs": cluster["spec"]["headGroupSpec"]}
    with pytest.raises(ValidationError):
        checked.validate(wrong)
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")


def test_the_head_runs_the_service(
    service: tuple[dict[str, Any], dict[str, Any]], job: dict[str, Any]
) -> None:
    door, cluster = service
    spec = cluster["spec"]
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    (group,) = spec["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    (program,) = head["args"]
    assert subprocess.run(["bash", "-n", "-c", program]).returncode == 0
    (line,) = (each for each in program.splitlines() if "autofit serve" in each)
    options = parse(line.strip())
    assert (options["address"], options["host"], options["port"]) == ("auto", "0.0.0.0", 8600)
    assert head["ports"] == [{"name": "http", "containerPort": options["port"]}]
    assert [each["targetPort"] for each in door["spec"]["ports"]] == [options["port"]]
    labels = {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": "head"}
    assert door["spec"]["selector"] == labels
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    assert all("KUBERAY_GEN_RAY_START_CMD" in each["args"][0] for each in (head, worker))
    (store,) = (each["value"] for each in head["env"] if each["name"] == "STORE")
    assert store.startswith("postgresql+psycopg://")
    assert worker["image"] == head["image"]
    assert spec["rayVersion"] == job["spec"]["rayClusterSpec"]["rayVersion"]
    assert spec["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("name", ["kuberay.yaml", "kuberay-service.yaml"])
def test_pods_have_no_more_rights_than_they_need(deploy: Path, name: str) -> None:
    found = resources(deploy / name)
    (cluster,) = (found[kind] for kind in ("RayCluster", "RayJob") if kind in found)
    spec = cluster["spec"].get("rayClusterSpec", cluster["spec"])
    labels = {"ray.io/cluster": cluster["metadata"]["name"]}
    selected = found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
        own = group["template"].get("metadata", {}).get("labels", {})
        assert selected.items() <= {**labels, **own}.items(), "the policy is of this pod"


def test_the_head_is_asked_whether_it_lives(
    service: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    (head,) = service[1]["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    probes = [head[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert probes == [{"path": PROBES[0], "port": "http"}] * 3


# --- the service with Docker Compose ----------------------------------------------------------


def test_compose_takes_the_file(root: Path, deploy: Path) -> None:
    schema = yaml.safe_load((root / "tests/deploy/compose-spec.yaml").read_text())
    Draft7Validator.check_schema(schema)
    found = yaml.safe_load((deploy / "compose.yaml").read_text())
    Draft7Validator(schema).validate(found)
    service = found["services"]["autofit"]
    mistakes: list[dict[str, Any]] = [{"port": service["ports"]}, {"init": []}, {"command": 1}]
    for wrong in mistakes:
        broken = {**found, "services": {"autofit": {**service, **wrong}}}
        with pytest.raises(ValidationError):
            Draft7Validator(schema).validate(broken)


def test_the_container_runs_the_service(deploy: Path) -> None:
    found = yaml.safe_load((deploy / "compose.yaml").read_text())
    service = found["services"]["autofit"]
    options = parse(shlex.join(service["command"]))
    assert service["ports"] == [f"127.0.0.1:{options['port']}:{options['port']}"]
    assert f":{options['port']}/readyz" in service["healthcheck"]["test"][-1]
    folders = dict(volume.split(":") for volume in service["volumes"])
    assert folders.keys() == found["volumes"].keys()
    folder = str(Path(options["storage"]).parent)
    assert folders == {"store": folder, "tmp": "/tmp"}, "a new container finds the store"
    context = deploy / service["build"]["context"]
    assert (context / service["build"]["dockerfile"]).samefile(deploy / "Dockerfile")
    (extras,) = re.findall(r"/opt/autofit\[([\w,]+)\]", (deploy / "Dockerfile").read_text())
    assert "serve" in extras.split(",")


def test_a_trial_in_the_container_may_have_its_overlays(deploy: Path) -> None:
    service = yaml.safe_load((deploy / "compose.yaml").read_text())["services"]["autofit"]
    options = dict(each.split("=") for each in service["security_opt"])
    profile = json.loads((deploy / options["seccomp"]).read_text())
    (denied,) = profile["syscalls"]
    assert (profile["defaultAction"], denied["action"]) == ("SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO")
    assert {"bpf", "init_module", "kexec_load", "keyctl"} <= {*denied["names"]}
    assert not {"unshare", "mount", "setns", "clone", "clone3"} & {*denied["names"]}
    assert options["apparmor"] == "unconfined", "Docker's own profile denies mount"


# --- the image: not built here, there is no Docker --------------------------------------------


def test_the_image_is_written_as_it_should_be(root: Path, deploy: Path) -> None:
    text = (deploy / "Dockerfile").read_text()
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    lines = [line.split(maxsplit=1) for line in joined.splitlines() if line]
    assert {name for name, _ in lines} == INSTRUCTIONS
    (base,) = (rest for name, rest in lines if name == "FROM")
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", base), "pinned, and never latest"
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    python = tuple(map(int, base.split(":")[1].split(".")[:2]))
    assert python >= tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    (extras,) = re.findall(r"/opt/autofit\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    users = [rest for name, rest in lines if name == "USER"]
    assert users
    assert "root" not in users
    assert lines[-1][0] == "WORKDIR", "nothing is installed as a user"
    for run in (rest for name, rest in lines if name == "RUN"):
        assert subprocess.run(["bash", "-n", "-c", run]).returncode == 0
    assert "-c /opt/autofit/constraints-cpu.txt" in text
    copied = [rest.split()[0] for name, rest in lines if name == "COPY"]
    assert all((root / source).exists() for source in copied)
    assert ".venv" in (deploy / "Dockerfile.dockerignore").read_text().splitlines()


# --- Slurm ------------------------------------------------------------------------------------


def test_the_batch_script_is_sound(deploy: Path) -> None:
    script = deploy / "slurm.sh"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True)
    if not (checker := TOOLS / "shellcheck").exists():
        pytest.skip("shellcheck is not installed: pip install -e '.[dev]'")
    checked = subprocess.run([checker, script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_the_batch_script_says_how_it_is_started(deploy: Path) -> None:
    text = (deploy / "slurm.sh").read_text()
    (usage,) = re.findall(r"^# +sbatch deploy/slurm\.sh (.*)$", text, re.MULTILINE)
    asked = parse(f"autofit search --address here {usage}")
    assert asked["script"] == "train.py"
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["gpus"] == int(directives["nodes"]) * int(directives["gpus-per-node"])
    assert directives["ntasks-per-node"] == "1"
