from tests.bite.fault import Fault

FAULTS: list[Fault] = []
