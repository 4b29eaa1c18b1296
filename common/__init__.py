"""What every Slackwater service shares. Imports no torch outside common.models."""
