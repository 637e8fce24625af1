"""The lake, which contains the tables, and the control store, which contains limits, pauses and claims of all runs."""

import os

from pipeline_platform.home import home
from pipeline_platform.orchestration import ControlResource, LakeResource
from resources.environment import secret

lake = LakeResource(root=os.environ.get("PIPELINE_PLATFORM_LAKE", str(home() / "lake")))
control = ControlResource(url=secret("PIPELINE_PLATFORM_CONTROL", f"sqlite:///{home()}/control.sqlite"))
