"""Token eviction: what a compressible head keeps.

A new policy is a ``@register`` class in :mod:`rlkv.eviction.policies`, and its import here.
"""

from rlkv.eviction.base import POLICIES as POLICIES
from rlkv.eviction.base import EvictionPolicy as EvictionPolicy
from rlkv.eviction.base import make_policy as make_policy
from rlkv.eviction.base import parse_options as parse_options
from rlkv.eviction.base import register as register
from rlkv.eviction.policies import H2O as H2O
from rlkv.eviction.policies import RPC as RPC
from rlkv.eviction.policies import TOVA as TOVA
from rlkv.eviction.policies import RandomEviction as RandomEviction
from rlkv.eviction.policies import SinkWindow as SinkWindow
from rlkv.eviction.policies import SnapKV as SnapKV
from rlkv.eviction.rkv import RKV as RKV
