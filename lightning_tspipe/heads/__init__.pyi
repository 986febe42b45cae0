from .student import StudentFanout as StudentFanout
from .training import FanoutTraining as FanoutTraining
from .training import HeadOptimizers as HeadOptimizers
