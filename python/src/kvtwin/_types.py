"""Type aliases."""

from typing import Any

import numpy as np
import numpy.typing as npt

#: Any numpy array.
Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
