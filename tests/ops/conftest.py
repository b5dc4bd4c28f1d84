import pytest

from clearhead.errors import ClearheadError
from clearhead.ops import dispatch


@pytest.fixture(params=["torch", "c"])
def backend(request, monkeypatch):
    """Each backend in turn; "c" is skipped only where no compiler can build it."""
    monkeypatch.setenv(dispatch.VARIABLE, request.param)
    try:
        assert dispatch.chosen() == request.param
    except ClearheadError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request):
    """Both thread counts, and the one before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
