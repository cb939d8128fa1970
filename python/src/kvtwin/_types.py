"""Names of types."""

from typing import Any

import numpy as np
import numpy.typing as npt

#: Any array of numpy's.
Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
