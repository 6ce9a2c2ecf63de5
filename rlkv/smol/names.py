"""The people of the problems.  No name begins with another one, so that a fact's first token never leaves a choice."""

from __future__ import annotations

_NAMES = (
    "Aaron Abigail Adam Adele Agnes Alan Alba Albert Alice Amy Andrew Angela Anna Anton April Arthur Audrey Barbara "
    "Beatrice Bella Ben Bernard Beth Blake Boris Brandon Brenda Brian Bruce Bryan Caleb Carl Carmen Caroline "
    "Catherine Cecil Charles Charlotte Chloe Chris Claire Clara Claude Colin Connor Cora Craig Curtis Cynthia Daisy "
    "Damon Daniel Daphne Darren David Dean Deborah Dennis Derek Diana Dominic Donald Dora Doris Dorothy Douglas Dylan "
    "Edgar Edith Edward Eileen Elena Elizabeth Ella Ellen Elsa Emily Emma Eric Ernest Esther Ethan Evan Felix Fiona "
    "Florence Frances Frank Fred Gabriel Gavin Gemma George Gerald Gilbert Gina Gloria Gordon Grace Graham Greg "
    "Hannah Harold Harry Hazel Heather Hector Helen Henry Herman Holly Howard Hugo Ian Ida Ingrid Irene Iris Isaac "
    "Isabel Ivan Ivy Jack Jacob James Janet Jason Jasper Jean Jenny Jeremy Jerome Jesse Jill Joan Joel John Jonas "
    "Joseph Joyce Judith Julian Justin Karen Karl Kate Keith Kelly Kenneth Kevin Kim Kyle Larry Laura Lauren Leah Leo "
    "Leslie Lewis Liam Lily Linda Lisa Logan Lois Louis Lucas Lucy Luke Luther Lydia Mabel Malcolm Marco Margaret "
    "Maria Marion Mark Martha Martin Mary Mason Matthew Maude Maurice Max Megan Melissa Mercy Mia Michael Milo Miriam "
    "Molly Monica Morgan Mona Nancy Naomi Natalie Nathan Neil Nelson Nicholas Nicole Nigel Nina Noah Nora Norman Olga "
    "Oliver Olivia Omar Oscar Otto Owen Pamela Patricia Paul Penny Percy Perry Peter Philip Phoebe Phyllis Quentin "
    "Rachel Ralph Raymond Rebecca Reggie Rex Richard Rita Robert Robin Rodney Roger Roland Rosa Ross Roy Ruby Rufus "
    "Rupert Russell Ruth Ryan Sally Sam Sandra Sarah Scott Sean Seth Sharon Sheila Shirley Simon Sofia Sonia Sophie "
    "Stanley Stella Stephen Steven Susan Sylvia Ted Teresa Terry Thelma Theodore Thomas Tim Tina Toby Todd Tom Tracy "
    "Trevor Troy Ursula Valerie Vera Vernon Victor Vincent Viola Violet Virginia Wade Walter Wanda Warren Wayne Wendy "
    "Wesley Wilfred William Winston Xavier Yvonne Zoe"
)
HELD_OUT_NAMES = tuple(_NAMES.split()[::5])
"""fine-tuning never sees these"""
NAMES = tuple(name for name in _NAMES.split() if name not in HELD_OUT_NAMES)
