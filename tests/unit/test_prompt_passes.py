"""A capture that runs out of memory."""

import pytest
import torch

from longspec.inference.engine import capture


@pytest.mark.parametrize("failures", [1, 2])
def test_a_capture_without_memory_is_tried_once_more(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that the first, uncaptured run left cached are freed in between."""
    errors = [torch.OutOfMemoryError("out of memory")] * failures

    def captured(call: object, device: torch.device) -> object:
        if errors:
            raise errors.pop()
        return call

    monkeypatch.setattr(capture, "CapturedPass", captured)
    if failures == 1:
        assert capture.capture_pass(print, torch.device("cpu")) is print
    else:
        with pytest.raises(torch.OutOfMemoryError):
            capture.capture_pass(print, torch.device("cpu"))
