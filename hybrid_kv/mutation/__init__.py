"""Known bugs of other engines, planted in a copy of this one, and what catches them first."""
