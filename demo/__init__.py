"""The demo's text and labels: what the installed Python packages say about themselves."""

from demo.data import DemoData, DemoDomain, DemoTenant, write_demo_data

__all__ = ["DemoData", "DemoDomain", "DemoTenant", "write_demo_data"]
