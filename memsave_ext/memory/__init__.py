"""Shows memory: how much is held, by what, and when."""

from ..predict.applied import Applied
from ..predict.devices import FitsOnDevices
from ..predict.fit import fit
from ..predict.fits import fits
from ..predict.footprint import Footprint, footprint
from ..predict.found import Fit, Fits
from ..predict.predict import PredictedStep, predict
from .account import Growth, Region, Step, TensorAtPeak, Timeline
from .compare import Comparison, compare
from .events import CATEGORIES, PHASES
from .snapshot import plot_snapshot
from .tracking import Track, track
from .usage import Usage, usage

__all__ = [
    "CATEGORIES",
    "PHASES",
    "Applied",
    "Comparison",
    "Fit",
    "Fits",
    "FitsOnDevices",
    "Footprint",
    "Growth",
    "PredictedStep",
    "Region",
    "Step",
    "TensorAtPeak",
    "Timeline",
    "Track",
    "Usage",
    "compare",
    "fit",
    "fits",
    "footprint",
    "plot_snapshot",
    "predict",
    "track",
    "usage",
]
