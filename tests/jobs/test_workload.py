import pytest

from autopar.errors import AutoparError
from autopar.jobs.workload import Job, SpeedCurve, check_jobs, read_curves, read_jobs

HEADER = "job,submitted_s,model,devices,plan,steps\n"


def test_files_are_read(tmp_path):
    (tmp_path / "jobs.csv").write_text(HEADER + "b,5,m,2,ddp,10\na,0,m,1,tp=1 dp=1,3\n")
    (tmp_path / "steps.csv").write_text(
        "model,devices,plan,step_s\nm,1,tp=1 dp=1,2.0\nm,2,ddp,1.5\nm,2,zero,1.0\nm,4,ddp,1.2\n"
    )
    jobs, curves = read_jobs(tmp_path / "jobs.csv"), read_curves([tmp_path / "steps.csv"])
    assert [job.name for job in jobs] == ["a", "b"] and jobs[0] == Job("a", 0, "m", 1, "tp=1 dp=1", 3)
    curve = curves["m"]
    assert curve.sizes == (1, 2) and curve.step_s(3) == 1.0 and curve.plan_of(4) == "zero"
    assert curve.asked_s(jobs[1]) == 1.5
    check_jobs(jobs, curves, 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,-1,m,1,ddp,3", "line 2: submitted_s expects a number of 0 or more, found '-1'"),
        ("a,0,m,0,ddp,3", "devices expects a whole number of 1 or more"),
        ("a,0,m,1.5,ddp,3", "devices expects a whole number"),
        ("a,0,m,1,ddp,nan", "steps expects a whole number"),
        ("a,0,m,1", "expected 6 cells"),
        ("a,0,m,1,ddp,3\na,0,m,1,ddp,3", "two jobs have one name"),
    ],
)
def test_rows_that_are_no_jobs_are_refused(tmp_path, row, message):
    (tmp_path / "jobs.csv").write_text(HEADER + row + "\n")
    with pytest.raises(AutoparError, match=message):
        read_jobs(tmp_path / "jobs.csv")


def test_steps_that_are_none_are_refused(tmp_path):
    path = tmp_path / "steps.csv"
    for text, message in (
        ("model,devices,plan,step_s\nm,1,ddp,-2\n", "step_s expects"),
        ("model,devices\n", "no column plan, step_s"),
        ("model,devices,plan,step_s\nm,1,ddp,0\n", "more than 0"),
    ):
        path.write_text(text)
        with pytest.raises(AutoparError, match=message):
            read_curves([path])
    with pytest.raises(AutoparError, match="cannot be read"):
        read_curves([tmp_path / "none.csv"])


@pytest.mark.parametrize(("other", "told"), [("a100,8", "cluster 'a100'.*'h100'"), ("h100,16", "batch '16'.*'8'")])
def test_steps_that_are_not_comparable_are_refused(tmp_path, other, told):
    (tmp_path / "steps.csv").write_text(f"model,devices,plan,step_s,cluster,batch\na,2,x,1,h100,8\na,4,y,1,{other}\n")
    with pytest.raises(AutoparError, match=f"line 3.*{told}"):
        read_curves([tmp_path / "steps.csv"])
    (tmp_path / "measured.csv").write_text("model,devices,plan,step_s\na,8,z,0.25\n")
    (tmp_path / "steps.csv").write_text("model,devices,plan,step_s,cluster,batch\na,2,x,1,h100,8\n")
    assert read_curves([tmp_path / "steps.csv", tmp_path / "measured.csv"])["a"].step_s(8) == 0.25


def test_jobs_that_cannot_be_served_are_refused():
    curves = {"m": SpeedCurve("m", {(1, "ddp"): 1.0})}
    for job, message in (
        (Job("a", 0, "m", 9, "ddp", 1), "asks for 9 devices, the cluster has 8"),
        (Job("a", 0, "x", 1, "ddp", 1), "no steps are known"),
        (Job("a", 0, "m", 1, "zero", 1), "no such row"),
    ):
        with pytest.raises(AutoparError, match=message):
            check_jobs([job], curves, 8)
