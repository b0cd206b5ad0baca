"""The commands that need the builder, registered as entry points of the group `hplm.build`, each as lazy as ours."""
