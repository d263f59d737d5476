"""What each replaced forward rests on: guards, stand-ins, the state of one forward, the report."""
