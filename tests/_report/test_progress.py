"""Long work says on a terminal what it is doing, and nothing anywhere else."""

from keras_dist._report.progress import progress_of


def shown_by(capsys, show=None):
    with progress_of(show) as say:
        say("Building a tower")
        say("Painting it")
    return capsys.readouterr()


def test_on_a_terminal_every_part_is_shown_on_standard_error(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes what it writes to for a terminal
    shown = shown_by(capsys, show=True)
    assert "Painting it" in shown.err
    assert shown.out == ""


def test_elsewhere_nothing_is_shown_unless_asked_for(capsys, monkeypatch):
    assert shown_by(capsys) == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "Painting it" in shown_by(capsys).err
    assert shown_by(capsys, show=False) == ("", "")
