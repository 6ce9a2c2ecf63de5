"""Token eviction: what a compressible head keeps.

A new policy is one file with a ``@register`` class (:mod:`rlkv.eviction.base`) and its import here.
"""

from rlkv.eviction.base import EvictionPolicy as EvictionPolicy
from rlkv.eviction.h2o import H2O as H2O
from rlkv.eviction.random_eviction import RandomEviction as RandomEviction
from rlkv.eviction.registry import POLICIES as POLICIES
from rlkv.eviction.registry import make_policy as make_policy
from rlkv.eviction.registry import parse_options as parse_options
from rlkv.eviction.registry import register as register
from rlkv.eviction.rkv import RKV as RKV
from rlkv.eviction.rpc import RPC as RPC
from rlkv.eviction.sink_window import SinkWindow as SinkWindow
from rlkv.eviction.snapkv import SnapKV as SnapKV
from rlkv.eviction.tova import TOVA as TOVA
