"""`./run demo`. Its texts and labels are made from the docstrings of the installed Python packages."""

from demo.data import DemoData, DemoDomain, DemoTenant, write_demo_data

__all__ = ["DemoData", "DemoDomain", "DemoTenant", "write_demo_data"]
