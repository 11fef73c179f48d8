"""Progress is shown on a terminal, and nowhere else."""

from keras_dist._report.progress import show_progress


def shown_by(capsys, show=None):
    with show_progress(show) as report:
        report("Building a tower")
        report("Painting it")
    return capsys.readouterr()


def test_every_activity_is_shown_on_standard_error_of_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats any file as a terminal
    shown = shown_by(capsys, show=True)
    assert "Painting it" in shown.err
    assert shown.out == ""


def test_nothing_is_shown_elsewhere_unless_requested(capsys, monkeypatch):
    assert shown_by(capsys) == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "Painting it" in shown_by(capsys).err
    assert shown_by(capsys, show=False) == ("", "")
