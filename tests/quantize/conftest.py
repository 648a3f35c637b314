import pytest

from tests.quantize import small


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Programs that run once or twice are not worth optimising: half of what these tests cost."""
    with small.quickly_compiled():
        yield
